/* Calls a handler's ``entry`` as XLA does: the call is read from argv[1], the arrays go to argv[2].

   The call, in 64-bit integers: threads; number of memory blocks, and bytes of each, with its data
   padded to 8; number of arguments, results; of each the block, type, axes, sizes; number of
   attributes; of each the type and 8 bytes.  Each block ends where a page begins that nobody may
   touch, if its size is a multiple of 64, and begins at a multiple of 64 bytes in any case. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int64_t word;
extern void *entry(void *frame);

static word threads, started;
static pthread_t pool[64];

struct work { void (*task)(void *); void *data; };

static void *run(void *argument) {
  struct work *work = argument;
  work->task(work->data);
  free(work);
  return NULL;
}

static void *create(word *arguments) {
  fprintf(stderr, "%s", (char *)arguments[2]);
  return (void *)1;
}

static void *destroy(void *error) { return (void)error, NULL; }

static void *schedule(word *arguments) {
  struct work *work = malloc(sizeof *work);
  if (started == 64) return (void *)1;
  work->task = (void (*)(void *))arguments[3];
  work->data = (void *)arguments[4];
  pthread_create(&pool[started++], NULL, run, work);
  return NULL;
}

static void *num_threads(word *arguments) {
  *(word *)arguments[3] = threads;
  return NULL;
}

static char *place(word bytes) {
  word page = 4096, room = (bytes + page - 1) / page * page;
  char *memory = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(memory + room, page, PROT_NONE);
  return bytes % 64 ? memory : memory + room - bytes;
}

int main(int count, char **names) {
  FILE *file = fopen(names[1], "rb");
  word api[32] = {0}, frame[24] = {0}, n, i, rest;
  static word buffers[64][6], sizes[64][8], list[2][64], pairs[16][2], values[16], attributes[16];
  char *blocks[64];
  word bytes[64], n_blocks, filled = 0, found;
  if (count != 3 || !file) return 2;
#define TAKE(x) if (fread(&(x), 8, 1, file) != 1) return 2
  TAKE(threads);
  TAKE(n_blocks);
  for (i = 0; i < n_blocks; i++) {
    TAKE(bytes[i]);
    blocks[i] = place(bytes[i]);
    if (fread(blocks[i], 1, bytes[i], file) != (size_t)bytes[i]) return 2;
    fseek(file, -bytes[i] & 7, SEEK_CUR);
  }
  for (int which = 0; which < 2; which++) {
    TAKE(n);
    for (i = 0; i < n; i++, filled++) {
      word *one = buffers[filled];
      TAKE(found);
      TAKE(one[2]);
      TAKE(one[4]);
      for (rest = 0; rest < one[4]; rest++) TAKE(sizes[filled][rest]);
      one[0] = 48;
      one[3] = (word)blocks[found];
      one[5] = (word)sizes[filled];
      list[which][i] = (word)one;
    }
    frame[which ? 12 : 7] = n;
    frame[which ? 14 : 9] = (word)list[which];
  }
  TAKE(n);
  for (i = 0; i < n; i++) {
    TAKE(pairs[i][0]);
    TAKE(values[i]);
    pairs[i][1] = (word)&values[i];
    attributes[i] = (word)pairs[i];
  }
  frame[20] = (word)attributes;
  frame[2] = (word)api;
  frame[4] = 3;
  api[6] = (word)create;
  api[7] = (word)destroy;
  api[17] = (word)schedule;
  api[18] = (word)num_threads;
  fclose(file);
  if (entry(frame)) return 3;
  for (i = 0; i < started; i++) pthread_join(pool[i], NULL);
  file = fopen(names[2], "wb");
  for (i = 0; i < n_blocks; i++) fwrite(blocks[i], 1, bytes[i], file);
  return fclose(file);
}

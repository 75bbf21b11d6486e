"""Runs what Mosaic made of a kernel on the CPU, in random orders, and finds its races.

``program`` writes a lowered module as Python over numpy.  ``asm`` has its PTX, ``machine`` the
warps, barriers and copies of a cluster, and ``clocks`` what happens before what.
``launch.emulated`` is the way in.  No kernel has code of its own here.

The model
    warps       those of a task take each step together; tasks go on in a seeded order.  A warp's
                own lanes are in step, so a missing ``bar.warp.sync`` goes unnoticed
    barriers    mbarriers with phases, arrivals and bytes; bar.sync; a cluster's.  An mbarrier must
                be known to be initialised.  Its phase may not end before the waiters of the last
                one saw that
    copies      cp.async by groups; bulk copies and st.async, which land at a seeded time and are
                known to who waits for their mbarrier; bulk stores, which read until they are waited
                for.  What they read must have been fenced (``fence.proxy.async``)
    products    wgmma reads until it is waited for.  It ends when all its four warps have begun it.
                Its results may not be used before
    registers   numpy arrays with an entry for each thread
    memory      a store must know of the reads and stores before it.  A load that races gives NaN,
                or -1: kernels may load what they do not use.  Others must be done with a block's
                shared memory when it ends.  Accesses lie inside of arrays, and those of device
                memory behind the wait for the kernel before

Of kernels with more than one warpgroup, or warps with roles (``cases`` has a call of each):

    family              kernels                                             cases
    few rows            quantized_matmul_row, _decode, _blocks              row, few rows, blocks
    mid rows            quantized_matmul_mid                                mid rows
    many rows           quantized_matmul_w4a16, _w8a16                      weight ...
                        _w8a8, _w4a8, _fp8, _fp8_block, _plain              pair ..., plain
    decode attention    decode_attention_kernel, _direct, _merge,           decode ..., direct, rope
                        rope_and_cache_write
    latent attention    latent_attention_kernel, chosen_latents_kernel      latent ..., chosen
    a past in int8      attend_past_int8                                    past
    experts             grouped_matmul_row, _sum                            experts ...
                        experts_sort, experts_rows, grouped_matmul_*        many pairs ...
                        route_experts, best_of_rows                         route, best
    rows                norms, gates and codes; append_greedy, _parts       norm ..., gate, greedy
    GLA                 gla_gates, gla_scan, gla_scan_reverse,              GLA ...
                        gla_chunk_products, gla_chunk_gradients, gla_step
    SSD                 ssd_scan, ssd_states                                SSD ...
    delta rule          gated_delta_chunks, _channels, _scan, _reverse,     delta ..., KDA ...
                        _gradients, _products, _step
    a layer's step      gated_delta_token, gla_head_norm                    (their own tests)

Not covered: collect_posted, copy_records and fetch_experts, whose warps share nothing.  Blocks of
different clusters run one after the other; their accesses of device memory are not compared.
"""

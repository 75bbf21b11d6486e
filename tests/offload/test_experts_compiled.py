"""Programs that move bytes compile for Hopper, within the accounted memory: those of experts that
lie one by one, and of pages that come back.  The wheels are those of the extra ``assemble``."""

from __future__ import annotations

import importlib.metadata
import re

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import assembling

pytestmark = [pytest.mark.slow, pytest.mark.newer]
FIND = importlib.metadata.Distribution.discover  # which reads no other package
HERE = {name for name in assembling.WHEELS if any(FIND(name=name))}
if MISSING := [name for name in assembling.WHEELS if name not in HERE]:
    pytest.skip(
        f"the assembler is not here: pip install 'jaxllama[assemble]' brings {', '.join(MISSING)}",
        allow_module_level=True,
    )

from jax.experimental import topologies  # noqa: E402
from jax.experimental.mosaic.gpu import utils  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from jaxllama.config import load_config  # noqa: E402
from jaxllama.engine.records import load_pages, page_leaves, record_bytes, save  # noqa: E402
from jaxllama.engine.slots import empty_slots  # noqa: E402
from jaxllama.executors.offloaded import expert_programs as programs  # noqa: E402
from jaxllama.executors.offloaded.experts import GROUP  # noqa: E402
from jaxllama.model import records  # noqa: E402
from jaxllama.model.cache import init_layer  # noqa: E402
from jaxllama.model.linear import Stream  # noqa: E402
from jaxllama.offload.experts import HotExperts, HotSlots, layout_of  # noqa: E402
from jaxllama.offload.policy import Policy  # noqa: E402
from jaxllama.planner.accounting import (  # noqa: E402
    expert_program_bytes,
    weight_shapes,
    weights_footprint,
)
from jaxllama.planner.trial import random_expert  # noqa: E402
from pallas_kernels import dispatch  # noqa: E402
from pallas_kernels.cards.architecture import BY_NAME  # noqa: E402
from pallas_kernels.cpu import CpuWeight, prepare_tree  # noqa: E402
from pallas_kernels.qtensor import tree_bytes  # noqa: E402


@pytest.fixture
def shape(monkeypatch):
    """Shapes on a Hopper GPU that is not there."""
    arch = BY_NAME["sm_90"]
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    monkeypatch.setattr(utils, "_infer_arch", lambda: arch.capability)
    where = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=assembling.description(arch)
    )
    place = SingleDeviceSharding(where.devices[0])

    def shape(*sizes: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    return shape


def layer_of(shape):
    """Return (layer, layouts, parts, hot) of a layer of gpt-oss-120b, 24 experts on the GPU."""
    cfg = load_config("gpt-oss-120b")
    alike = cfg.layers[1]
    shapes = weight_shapes(cfg, jnp.bfloat16, "none,experts_*=mxfp4")["layer_0"]
    layouts, hot = [], []
    for name in ("experts_gate_up", "experts_down"):
        weight = shapes["mlp"][name]["weight"]
        laid_out = prepare_tree(random_expert(weight))
        assert isinstance(laid_out, CpuWeight)  # which the GPU restores
        layouts.append(layout_of(*jax.tree.flatten(laid_out), "gpu"))
        hot.append(jax.tree.map(lambda x: shape(24, *x.shape[1:], dtype=x.dtype), weight))
    arrays = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), shapes)
    dense = {**arrays, "mlp": {"router": arrays["mlp"]["router"]}}
    ints = jnp.int32
    held = HotSlots(shape(24, dtype=ints), shape(129, dtype=ints), shape(128, dtype=jnp.float32))
    table = shape(128, 2, dtype=ints)
    biases = [shape(128, 5760), shape(128, 2880)]
    parts = programs.MixtureParts(dense, biases, (table, table))
    return alike, tuple(layouts), parts, HotExperts((hot[0], hot[1]), held)


@pytest.mark.parametrize(("tokens", "pairs"), [(1, 4), (16, 32)])
def test_gpt_oss_s_experts_compile_for_hopper(shape, tokens, pairs):
    layer, layouts, parts, hot = layer_of(shape)
    ints, width = jnp.int32, min(pairs, GROUP)
    rows = shape(pairs, dtype=ints)
    pieces = tuple(
        tuple(shape(layout.nbytes, dtype=jnp.uint8) for _ in range(width)) for layout in layouts
    )
    group = programs.LoadedGroup(shape(width, dtype=ints), pieces, rows, rows, rows)
    y, x = shape(tokens * 4, 2880, dtype=jnp.float32), shape(tokens, 2880)
    how = layer, layouts, parts.biases, parts.addresses
    loaded = programs.added_pairs.lower(*how, x, y, hot, group).compile()
    packed = sum(layout.nbytes for layout in layouts)
    assert loaded.memory_analysis().temp_size_in_bytes <= 3 * width * packed
    stream, lengths = Stream(shape(tokens, 1, 2880)), shape(tokens, dtype=ints)
    flat = programs.FlatParts.of(parts)
    found = programs.routed_layer.lower(
        layer, None, *flat, hot, stream, None, programs.Places(None, lengths, None)
    ).compile()
    whole = load_config("gpt-oss-120b")
    bound = expert_program_bytes(whole, Policy(experts="0/100"), tokens, jnp.bfloat16)
    assert found.memory_analysis().temp_size_in_bytes <= bound + (1 << 20)
    read = group._replace(pieces=None)
    found = programs.added_pairs.lower(*how, x, y, hot, read).compile()
    assert found.memory_analysis().temp_size_in_bytes <= 3 * width * packed


@pytest.mark.parametrize(
    ("rows", "width", "mails"), [(1, 1, ""), (16, 1, "both"), (2, 64, ""), (16, 1, "all")]
)
def test_layers_that_read_their_experts_compile_for_hopper(shape, rows, width, mails):
    layer, layouts, parts, hot = layer_of(shape)
    ints = jnp.int32

    def on_device(tree):
        return jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), tree)

    state = on_device(jax.eval_shape(lambda: init_layer(layer, rows, 64, "bfloat16")))
    blank = jax.ShapeDtypeStruct((rows,), ints)
    at = jax.eval_shape(lambda n: records.positions_of(layer, n, n, width), blank)
    positions, rope = on_device(at)
    flat = programs.FlatParts.of(parts)
    places = programs.Places(positions, shape(rows, dtype=ints), rope)
    stream = Stream(shape(rows, width, 2880))
    count = programs.FetchedCount(shape(3, dtype=ints), shape(1, dtype=ints))
    cost = shape(dtype=jnp.float32) if mails == "both" else None
    mail = programs.Mail(shape(2, dtype=ints), cost, cost) if mails else None
    kind, two = programs.LayerKind(layer, layouts, flat.structure), [0, 1]
    found = programs.fetched.lower(
        (kind,) * 2,
        True,
        [flat.leaves for _ in two],
        [hot for _ in two],
        stream,
        [state for _ in two],
        places,
        count,
        False,
        mail,
    ).compile()
    policy = Policy.parse("100 0 100 0 100 0 experts=0/100")
    whole = load_config("gpt-oss-120b")
    _, loading = weights_footprint(whole, policy, jnp.bfloat16, "none,experts_*=mxfp4", False)
    bound = loading + expert_program_bytes(whole, policy, rows * width, jnp.bfloat16)
    memory = found.memory_analysis()
    assert memory.temp_size_in_bytes <= bound
    if rows * width == 1:  # the second layer's four experts lie where the first one's lay
        assert memory.temp_size_in_bytes <= 6 * sum(layout.nbytes for layout in layouts)
    # The slots change where they are: no program copies them.
    text = found.as_text()
    if mails == "all":  # nothing is loaded, in a loop or else
        assert not re.search(r" (while|scatter|sort)\(", text)
        return
    assert memory.alias_size_in_bytes >= 2 * tree_bytes(hot.weights)
    assert " sort(" not in text
    assert not re.findall(r"= \S+\[24,.* copy\(", text)
    words = re.findall(r"= u32\[24,\S+ scatter\(.*", text)
    assert len(words) == 8 and all("unique_indices=true" in line for line in words)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4"])
def test_pages_leave_and_come_back_by_one_kernel(shape, kv_dtype):
    """It writes in place, and no record is copied before."""
    cfg = load_config("llama-3.1-8b")
    made = jax.eval_shape(lambda: empty_slots(cfg, 4, 16, 100, 64, 0, kv_dtype))
    slots = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), made)
    leaves, count = page_leaves(slots), 31
    pages = shape(count, dtype=jnp.int32)
    records = shape(count, record_bytes(leaves) // 4, dtype=jnp.uint32)
    found = load_pages.lower(slots, pages, records).compile()
    assert found.memory_analysis().alias_size_in_bytes >= tree_bytes(leaves)
    for program in (found, save.lower(leaves, pages).compile()):
        assert program.memory_analysis().temp_size_in_bytes <= 1 << 20
        text = program.as_text()
        assert text.count(" custom-call(") == 1
        assert not re.search(r" (while|copy|sort|scatter|fusion)\(", text)

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.weights.torch_bundle import ALIGNMENT, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=0, max_size=3)), max_size=6))
def test_round_trip_is_exact_for_every_dtype_and_shape(entries):
    tensors = [(f"t{i}", torch.randint(0, 200, shape).to(dtype)) for i, (dtype, shape) in enumerate(entries)]
    bundle = pack(tensors)
    back = dict(unpack(bundle))
    assert list(back) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)
    assert all(spec.offset % ALIGNMENT == 0 for spec in bundle.specs)


def test_tied_tensors_are_packed_once_under_the_first_name():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    bundle = pack([("embed", weight), ("head", weight), ("copy", weight.detach().clone())])
    assert [spec.name for spec in bundle.specs] == ["embed", "copy"]


def test_a_view_of_part_of_a_tensor_is_not_taken_for_a_tie():
    whole = torch.arange(6.0).view(2, 3)
    back = dict(unpack(pack([("whole", whole), ("first", whole[0]), ("turned", whole.t())])))
    assert list(back) == ["whole", "first", "turned"]
    assert torch.equal(back["turned"], whole.t())


def test_the_buffer_is_reused_when_it_fits_and_unpack_does_not_copy():
    first = pack([("w", torch.zeros(8))])
    second = pack([("w", torch.ones(8))], first.buffer)
    assert second.buffer is first.buffer
    ((_, view),) = unpack(second)
    second.buffer[:4] = np.frombuffer(np.float32(7).tobytes(), np.uint8)
    assert view[0] == 7
    assert pack([("w", torch.zeros(9000))], first.buffer).buffer is not first.buffer


def test_a_read_only_buffer_unpacks():
    bundle = pack([("w", torch.arange(5.0))])
    bundle.buffer.setflags(write=False)
    assert dict(unpack(bundle))["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="'w' is named twice"):
        pack([("w", torch.zeros(1)), ("w", torch.ones(1))])

"""The numbers of each type by the definition of the format (ggml-quants.c), one by one, apart from the library that reads them."""

import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gpu_worker.artifacts.gguf_tensors import _dequantize
from service_kit.gguf.tensor_types import SUPPORTED

NUM_BLOCKS = 40


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibbles(packed: bytes) -> list[int]:
    """The lower halves of all bytes, then the upper ones."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def fifths(packed: bytes) -> list[int]:
    """0 or 16 by the bits of a whole number."""
    bits = int.from_bytes(packed, "little")
    return [16 * (bits >> number & 1) for number in range(32)]


def scale_and_least(packed: bytes, number: int) -> tuple[int, int]:
    """Six bits each: of the first four in bytes of their own, of the others in what the first leave."""
    if number < 4:
        return packed[number] & 63, packed[number + 4] & 63
    rest = packed[number + 4]
    return rest & 15 | packed[number - 4] >> 6 << 4, rest >> 4 | packed[number] >> 6 << 4


def q8_0(block: bytes) -> Iterator[float]:
    return (half(block, 0) * signed(byte) for byte in block[2:])


def q4_0(block: bytes) -> Iterator[float]:
    return (half(block, 0) * (number - 8) for number in nibbles(block[2:]))


def q4_1(block: bytes) -> Iterator[float]:
    return (half(block, 0) * number + half(block, 2) for number in nibbles(block[4:]))


def q5_0(block: bytes) -> Iterator[float]:
    pairs = zip(nibbles(block[6:]), fifths(block[2:6]), strict=True)
    return (half(block, 0) * (low + high - 16) for low, high in pairs)


def q5_1(block: bytes) -> Iterator[float]:
    pairs = zip(nibbles(block[8:]), fifths(block[4:8]), strict=True)
    return (half(block, 0) * (low + high) + half(block, 2) for low, high in pairs)


def k_type(block: bytes, quarters: bytes, high: Callable[[int, int], int]) -> Iterator[float]:
    """Eight groups of 32; a quarter holds one group in its lower and the next in its upper halves."""
    for group in range(8):
        scale, least = scale_and_least(block[4:16], group)
        for place in range(32):
            byte = quarters[group // 2 * 32 + place]
            number = (byte >> 4 if group % 2 else byte & 15) + high(group, place)
            yield half(block, 0) * scale * number - half(block, 2) * least


def q4_k(block: bytes) -> Iterator[float]:
    return k_type(block, block[16:], lambda _group, _place: 0)


def q5_k(block: bytes) -> Iterator[float]:
    return k_type(block, block[48:], lambda group, place: 16 * (block[16 + place] >> group & 1))


def q6_k(block: bytes) -> Iterator[float]:
    for index in range(256):
        half_block, group, place = index // 128, index % 128 // 32, index % 32
        low = block[64 * half_block + 32 * (group % 2) + place]
        high = block[128 + 32 * half_block + place] >> 2 * group & 3
        number = (low >> 4 if group >= 2 else low & 15) + 16 * high - 32
        yield half(block, 208) * signed(block[192 + index // 16]) * number


def bf16(block: bytes) -> Iterator[float]:
    return iter(struct.unpack("<f", b"\0\0" + block))


# Where the fp16 numbers of a block stand: random bytes there might not be finite.
BY_TYPE = {
    "Q8_0": (q8_0, (0,)),
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q5_0": (q5_0, (0,)),
    "Q5_1": (q5_1, (0, 2)),
    "Q4_K": (q4_k, (0, 2)),
    "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
    "BF16": (bf16, ()),
}


@pytest.mark.parametrize("name", BY_TYPE)
def test_the_numbers_of_random_blocks_are_those_of_the_definition(name):
    numbers_of, halves = BY_TYPE[name]
    size = SUPPORTED[name]
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (NUM_BLOCKS, size.num_bytes), np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = generator.normal(size=(NUM_BLOCKS, 1)).astype(np.float16).view(np.uint8)
    if name == "BF16":
        blocks[:, 1] &= 0b10111111  # below 2
    expected = np.array([list(numbers_of(block.tobytes())) for block in blocks])
    assert expected.shape == (NUM_BLOCKS, size.num_values)
    found = _dequantize(blocks.reshape(1, -1), name, 1).reshape(expected.shape)
    # Of numbers that nearly cancel out, what single precision leaves.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_every_type_that_is_stored_in_another_form_is_compared():
    assert BY_TYPE.keys() == SUPPORTED.keys() - {"F32", "F16"}

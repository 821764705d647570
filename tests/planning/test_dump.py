"""Parsing of a compiler's dump, of a program small enough to check by hand."""

import operator

from jaxsp.planning import hlo
from jaxsp.planning.hlo import CompilerDump

BUFFERS = """BufferAssignment:
allocation 0: size 4096, page 0, parameter 3, shape |f32[4,256]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.3 @0> (size=4096,offset=0): f32[4,256]{1,0}
allocation 1: size 8192, color 5, page 0, parameter 0, shape |f32[2048]| at ShapeIndex {}:
allocation 2: size 64, thread-local:
 value: <9 inner @0> (size=4,offset=0): f32[]
allocation 3: size 300, page 0, preallocated-temp:
 value: <2 fusion.1{1} @0> (size=200,offset=0): bf16[10,10]{1,0}
 value: <3 loop{0} (phi) @0> (size=200,offset=0): bf16[10,10]{1,0}
 value: <4 gather @0> (size=100,offset=200): s8[100]{0}
 value: <5 in-a-fusion @0> (size=100,offset=200): s8[100]{0}
allocation 4: size 40, color 5, preallocated-temp:
 value: <6 copy @5> (size=40,offset=0): f32[10]{0:S(5)}
"""

LIVE_RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:fusion.1
  BufferLiveRange:
    fusion.1{1}:0-3
    loop{0}:3-5
    gather{}:4-6
    copy{}:7-8
"""


def small():
    return CompilerDump(buffer_assignment=BUFFERS, live_ranges=LIVE_RANGES, hlo_text="")


def test_arrays_are_read_with_their_places_and_live_ranges():
    fields = operator.attrgetter("begin_byte", "end_byte", "first_use", "last_use")
    assert [fields(array) for array in hlo.read_buffers(small())] == [
        (0, 200, 0, 3),
        (0, 200, 3, 5),
        (200, 300, 4, 6),
    ], "the array on the host has a memory of its own"


def test_the_bytes_of_an_operation_count_a_place_once_and_only_arrays_that_are_live():
    first, second, third = hlo.read_buffers(small())
    assert hlo.compute_live_bytes([first, second], 3) == 200, "two arrays in one place"
    assert hlo.compute_live_bytes([first, second, third], 4) == 300
    assert hlo.compute_live_bytes([first, third], 3) == 200
    assert hlo.compute_live_bytes([], 0) == 0

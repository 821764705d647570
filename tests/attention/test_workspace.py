"""The size of cuDNN's workspace is read from the text of a compiled program."""

from jaxsp.attention.kernels.cudnn import cudnn_calls

PROGRAM = """
HloModule jit_f, is_scheduled=true, entry_computation_layout={(u8[77777777]{0})->bf16[1,2]{1,0}}

%wrapped (param: bf16[1,8192,32,128]) -> (bf16[1,32,8192,128], u8[64]) {
  %fwd.5 = (bf16[1,32,8192,128]{3,1,2,0}, f32[1,32,8192]{2,1,0}, u8[FORWARD]{0}) custom-call(%q, \
%k, %v), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"workspace_size": "0"}
  %gemm.1 = (bf16[4096,4096]{1,0}, u8[33554432]{0}) custom-call(%fwd.6, %w), \
custom_call_target="__cublas$gemm"
  ROOT %bwd.8 = (bf16[1,32,8192,128]{3,1,2,0:S(1)}, bf16[1,8,8192,128]{3,1,2,0}, u8[BACKWARD]{0}) \
custom-call(u8[99999999]{0} %q, %k, %v), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %bwd.9 = (bf16[4,32,2048,128]{3,1,2,0}, u8[2048]{0}) custom-call(%q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", control-predecessors={%fwd.5}
}
"""
"""Lines as XLA writes them, written by hand; FORWARD and BACKWARD are sizes."""


def program(forward: int, backward: int) -> str:
    return PROGRAM.replace("FORWARD", str(forward)).replace("BACKWARD", str(backward))


def test_the_largest_workspace_of_the_attention_calls_counts():
    assert cudnn_calls.read_workspace_bytes(program(16, 4563402752)) == 4563402752
    assert cudnn_calls.read_workspace_bytes(program(4096, 0)) == 4096


def test_without_a_workspace_there_is_no_size():
    deviceless = program(0, 0).replace("u8[2048]", "u8[0]")
    assert cudnn_calls.read_workspace_bytes(deviceless) is None
    assert cudnn_calls.read_workspace_bytes("HloModule jit_f") is None

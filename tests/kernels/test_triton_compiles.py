"""Every kernel compiles for Hopper and Blackwell; no GPU needed. The matrix kernels use Hopper's matrix unit."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# A process of its own: where the interpreter is switched on, kernels are not compilable.
SCRIPT = r"""
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deepinfer.kernels.triton import activation, attention, cache, linear, norm, rotary, sampling, splits

POINTERS = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "x": "*bf16", "weight": "*bf16", "bias": "*bf16", "out": "*bf16",
            "residual": "*bf16", "normed": "*bf16", "total": "*bf16", "k_pool": "*bf16", "v_pool": "*bf16",
            "q_out": "*bf16", "k_out": "*bf16", "part": "*fp32", "stat": "*fp32", "best": "*fp32", "logits": "*fp32",
            "seed": "*i64", "ids": "*i64", "greedy": "*u8"}

def build(fn, capability, types=(), options=None, aligned=(), **constants):
    types = dict(types)
    names = [n for n in fn.arg_names if n not in constants]
    signature = {n: types.get(n) or (POINTERS.get(n[:-4], "*i32") if n.endswith("_ptr")
                                     else "fp32" if n in ("scale", "eps") else "i32") for n in names}
    signature |= {n: "constexpr" for n in constants}
    wide = [i for i, n in enumerate(fn.arg_names) if n.endswith("_ptr") or n in aligned]
    attrs = {(i,): [["tt.divisibility", 16]] for i in wide}
    values = {(fn.arg_names.index(n),): v for n, v in constants.items()}
    source = ASTSource(fn=fn, signature=signature, constexprs=values, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options or {})
    return {"wgmma": "wgmma" in made.asm["ptx"], "shared": made.metadata.shared}

def every(capability):
    tile = dict(WIDTH=128, BLOCK_D=128, PAGE=16, GROUP=4)
    strides = ("stride_q", "stride_q_head", "stride_k_page", "stride_k_line", "stride_k_head", "stride_v_page",
               "stride_v_line", "stride_v_head", "stride_x", "stride_weight")
    attend = attention._attend
    pages = {"table_ptr": "*i32"}
    yield "prefill", build(attend, capability, pages, dict(num_warps=8, num_stages=3), strides, BLOCK_M=128, BLOCK_N=64,
                           PARTIAL=False, IN_ORDER=False, **tile)
    yield "decode", build(attend, capability, pages, dict(num_warps=4, num_stages=3), strides, BLOCK_M=16, BLOCK_N=64,
                          PARTIAL=True, IN_ORDER=False, **tile)
    yield "invariant prefill", build(attend, capability, pages, dict(num_warps=4, num_stages=2), strides, BLOCK_M=64,
                                     BLOCK_N=64, PARTIAL=False, IN_ORDER=True, **tile)
    yield "invariant decode", build(attend, capability, pages, dict(num_warps=4, num_stages=2), strides, BLOCK_M=64,
                                    BLOCK_N=64, PARTIAL=True, IN_ORDER=False, **tile)
    for t in linear.TILES:
        name = f"linear {t.block_m} x {t.block_n}"
        yield name, build(linear._linear, capability, {}, dict(num_warps=t.num_warps, num_stages=t.num_stages), strides,
                          num_in=4096, HAS_BIAS=False, EVEN_K=True, BLOCK_M=t.block_m, BLOCK_N=t.block_n,
                          BLOCK_K=t.block_k)
    yield "merge", build(splits._merge, capability, WIDTH=128, BLOCK_D=128)
    for ids in (False, True):
        yield f"scan {ids}", build(sampling._scan, capability, {"column_ptr": "*i32"}, dict(enable_fp_fusion=False),
                                   HAS_IDS=ids, PURPOSE=0, GROUPS=512)
        yield f"choose {ids}", build(sampling._choose, capability, {"out_ptr": "*i64"}, HAS_IDS=ids, BLOCK=64)
    yield "noise", build(sampling._noise, capability, {"out_ptr": "*fp32"}, dict(enable_fp_fusion=False), PURPOSE=3,
                         GROUPS=512)
    yield "norm", build(norm._rms_norm, capability, HAS_RESIDUAL=True, BLOCK=4096)
    yield "rope", build(rotary._rope, capability, {"table_ptr": "*fp32"}, HALF=64, BLOCK=64, HEADS=16)
    yield "silu_mul", build(activation._silu_mul, capability, BLOCK=1024)
    yield "cache_write", build(cache._cache_write, capability, {"table_ptr": "*i32"}, WIDTH=128, PAGE=16, BLOCK=1024)

print(json.dumps(dict(every(int(sys.argv[1])))))
"""


def compiled(capability: int) -> dict[str, dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(capability)]
    # inspect.getsource is only needed of the kernels, which live in files.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_hopper():
    kernels = compiled(90)
    for name in ("prefill", "invariant prefill", "invariant decode", "linear 128 x 256", "linear 64 x 32"):
        assert kernels[name]["wgmma"], f"{name} misses Hopper's matrix unit"
    assert max(kernel["shared"] for kernel in kernels.values()) <= 227 * 1024


@pytest.mark.slow
def test_blackwell():
    assert len(compiled(100)) > 10

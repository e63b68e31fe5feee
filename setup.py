"""Builds the compiled kernels when there is a C compiler; everything else is in pyproject.toml.

A failing build is a warning, not an error: `python -m deepinfer doctor` then says why the native ops are missing.
"""

from glob import glob

from setuptools import Extension, setup

FOLDER = "src/deepinfer/kernels/native/csrc"

# -ffp-contract=off: products and sums are fused only where the code says so, see common.h.
# OpenMP is compiled in but not linked: its symbols come from the run-time that torch brings, see lib.py.
native = Extension(
    "deepinfer.kernels.native._native",
    sources=sorted(glob(f"{FOLDER}/*.c")),
    depends=glob(f"{FOLDER}/*.h"),
    extra_compile_args=["-std=c11", "-O3", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden"],
    optional=True,
)

setup(ext_modules=[native])

"""What pyproject.toml can't say: the CPU engine is compiled where there is a compiler, and done without elsewhere."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "dcpcomm.combine._native",
            ["dcpcomm/combine/native.c"],
            # Every operation rounded as written: contraction would make the result depend on the compiler.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)

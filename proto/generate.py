#!/usr/bin/env python3
"""Write the Python modules of headgate/v1/envelope.proto: `python proto/generate.py [FOLDER]`.

They go to where headgate has them, or to another folder. It needs the package grpcio-tools, in the version that
constraints.txt names.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCHEMA = "headgate/v1/envelope.proto"
PLACE = HERE.parent / "src/headgate/proto"


def generate(folder: Path) -> None:
    """Write envelope_pb2.py and envelope_pb2.pyi, and nothing else, to a folder that exists."""
    with tempfile.TemporaryDirectory() as made:
        options = [f"--proto_path={HERE}", f"--python_out={made}", f"--pyi_out={made}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, SCHEMA], check=True)  # noqa: S603 - ours
        # protoc lays them out by the schema's package, which headgate keeps in one place of its own.
        for file in Path(made, SCHEMA).parent.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PLACE)

"""What is committed of the gRPC API's code is what its definition generates."""

import subprocess
import sys
from pathlib import Path

import deployments.grpc
from deployments.grpc import SERVICERS, inference_pb2

HERE = Path(deployments.grpc.__file__).parent
ROOT = HERE.parents[1]


def test_generated_anew_it_is_the_same(tmp_path):
    to = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", f"deployments/grpc={ROOT / 'proto'}", *to]
    subprocess.run([*command, "deployments/grpc/inference.proto"], check=True, cwd=ROOT)
    generated = sorted((tmp_path / "deployments" / "grpc").iterdir())
    assert len(generated) == 3
    for path in generated:
        assert path.read_text() == (HERE / path.name).read_text(), f"{path.name}: run `make proto`"


def test_serve_finds_the_services_by_their_names():
    from ray.serve.config import gRPCOptions

    assert len(gRPCOptions(grpc_servicer_functions=list(SERVICERS)).grpc_servicer_func_callable) == 2


def test_the_ingress_has_every_method():
    from deployments.grpc.methods import InferenceIngress

    for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods:
        assert callable(getattr(InferenceIngress, method.name))

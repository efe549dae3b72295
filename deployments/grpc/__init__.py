"""The gRPC API: a request goes through the HTTP API's application, and its answer comes back as messages.

`inference_pb2*` are generated from `proto/inference.proto` (`make proto`).
"""

from typing import Final

SERVICERS: Final = (
    "deployments.grpc.inference_pb2_grpc.add_InferenceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
"""What Serve's gRPC proxy is started with, as in `grpc_options` of a Serve configuration."""

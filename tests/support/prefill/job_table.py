"""The jobs of a prefill replica whose engine answers when it is told to, and calls for them."""

import asyncio
from collections import deque
from types import SimpleNamespace
from unittest.mock import MagicMock

from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from engine_host.places import Places
from prefill_node.replica.governing.ledger import PrefillLedger
from prefill_node.replica.jobs import JobTable
from sampling.carried import PrefillRequest, first_token
from slo.model_digest import ModelDigest
from slo.predict.prefill_time import PrefillPredictor
from slo.request import CONTEXT_HEADER, JOB_XARG, JobId, ReplicaId, RequestContext
from slo.tiers import DEFAULT_TIERS, STANDARD

SQL = LoRARequest("sql", 1, "/adapters/sql")
MODEL = ModelDigest("model")
TOKEN = SimpleNamespace(token_ids=[7], finish_reason="length")


class Client:
    """vLLM's engine client; what it is asked for waits until `go` is set."""

    def __init__(self):
        self.asked, self.aborted, self.adapters = deque(), [], []
        self.go = asyncio.Event()
        self.engine_core = SimpleNamespace(abort_requests_async=self.abort)
        self.failure, self.token = None, TOKEN
        model = SimpleNamespace(use_fp64_gumbel=False, max_model_len=64)
        self.vllm_config = SimpleNamespace(use_v2_model_runner=False, model_config=model)

    async def is_tracing_enabled(self):
        return False

    async def generate(self, prompt, params, request_id, **options):
        self.asked.append((prompt["prompt_token_ids"], params.extra_args[JOB_XARG], params))
        self.adapters.append(options["lora_request"])
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        yield SimpleNamespace(
            outputs=[self.token],
            kv_transfer_params={"at": request_id},
            num_cached_tokens=2,
            num_cache_creation_tokens=1,
        )

    async def abort(self, names):
        self.aborted += names


def job_table(client):
    """Of a replica with eight places."""
    governor = MagicMock(ledger=PrefillLedger(PrefillPredictor(1e-3, 0.0)), weights={STANDARD: 1.0})
    governor.arrived.side_effect = lambda job, now_s: governor.ledger.arrived(job)
    report = SimpleNamespace(
        is_dead=False, replica_id=ReplicaId("here"), digest=MODEL, note_length=lambda *_: None
    )
    serving = SimpleNamespace(
        create_error_response=lambda error: SimpleNamespace(
            error=SimpleNamespace(
                model_dump=lambda: {"message": str(error), "type": "BadRequestError", "code": 400}
            )
        )
    )
    models = SimpleNamespace(lora_requests={"sql": SQL})
    engine = SimpleNamespace(_engine_client=client, _oai_serving_completion=serving, _oai_models=models)
    places = Places(8, DEFAULT_TIERS)
    return JobTable(
        engine, governor, MagicMock(), MagicMock(), report, MagicMock(), MagicMock(), places=places
    )


def called(table, attempt=0, adapter=None, job="job", tier=STANDARD, digest=MODEL, tokens=3):
    context = RequestContext(JobId(job), "request", tier, None, attempt=attempt)
    params = first_token(SamplingParams(temperature=0.7, seed=4, max_tokens=9))
    request = PrefillRequest([*range(1, tokens + 1)], params, adapter=adapter, draws="first", digest=digest)
    info = SimpleNamespace(headers={CONTEXT_HEADER: context.encode()})
    return table.prefill(request, info)


async def prefill(table, **given):
    (answer,) = [answer async for answer in called(table, **given)]
    return answer

"""Staleness bounded per sample: a trainer takes no sample that is more than two versions old.

    python examples/bounded_staleness.py

The trainer publishes a version per step and asks a rollout for samples over HTTP. Each request
names the least version that it accepts. The rollout follows the trainer, but only now and then, as
an update costs it a pause. Where it has fallen behind, its gate (`VersionGate`) answers 409 before
anything is generated, and the trainer asks again after `Retry-After`. Each answer has the stamps of
the weights at its start and at its end. They go into the sample's metadata, and the trainer has the
coordinator verify them.

The example checks that each sample was made by the version that its stamp names: the trainer
remembers what each version would have said. Needs torch and uvicorn:
`pip install 'tensorhub-ros[torch,http]'`.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anyio
import torch
import uvicorn

import tensorhub
from tensorhub.integrations.admission import VersionGate

MODEL, SIZE = "policy", 1024
STEPS, BATCH = 8, 4
BOUND = 2  # versions that a sample may be behind the trainer
BETWEEN_S = 0.5  # updates of the rollout, at least


@dataclass(frozen=True)
class Sample:
    value: float  # what the policy has said
    trained: int  # the trainer's version when it used the sample
    stamp: tensorhub.Stamp


class Engine:
    """In place of an inference engine: an ASGI application that says what its weights come to."""

    def __init__(self) -> None:
        self.weights = torch.zeros(SIZE, dtype=torch.float64)
        self._generating = anyio.Lock()

    async def pause(self, _: tensorhub.VersionInfo) -> None:
        await self._generating.acquire()

    def resume(self) -> None:
        if self._generating.statistics().locked:
            self._generating.release()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._generating:  # an update waits for it, and it for an update
            body = json.dumps({"value": self.weights.sum().item()}).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def follow(hub: tensorhub.Hub, weights: tensorhub.Weights, engine: Engine) -> None:
    async for _ in hub.watch(MODEL):
        try:
            await weights.update("latest", before_write=engine.pause)
        finally:
            engine.resume()
        await anyio.sleep(BETWEEN_S)


async def ask(url: str, least: int) -> tuple[dict[str, Any], str, str, int]:
    """A sample from weights of that version or a newer one; its two stamps; and how often the
    engine was too far behind.
    """
    request = Request(url, headers={"TensorHub-Version": f">={least}"})

    def once() -> tuple[dict[str, Any], str, str]:
        with urlopen(request, timeout=30) as answer:
            said = answer.headers
            ends = said["TensorHub-Version-Start"], said["TensorHub-Version-End"]
            return json.load(answer), *ends

    for refused in range(60):
        try:
            return *await anyio.to_thread.run_sync(once), refused
        except HTTPError as error:
            with error:
                if error.code != 409:
                    raise
                wait_s = float(error.headers["Retry-After"])
        await anyio.sleep(wait_s)
    raise TimeoutError(f"the engine has not come to version {least}")


async def train(
    hub: tensorhub.Hub, url: str, say: Callable[[str], object]
) -> tuple[list[Sample], dict[int, float]]:
    """The samples, and what each version would have said."""
    weights = torch.zeros(SIZE, dtype=torch.float64)
    published = await hub.register(MODEL, {"w": weights})
    samples, said = list[Sample](), dict[int, float]()
    for step in range(1, STEPS + 1):
        async with published.mutate(step):
            weights += step  # the optimizer's step
        said[step] = weights.sum().item()
        answers = await asyncio.gather(*[ask(url, max(1, step - BOUND)) for _ in range(BATCH)])
        for sample, start, end, _ in answers:
            if start == end:  # else an update came between: its weights are not one version's
                stamp = tensorhub.Stamp.parse(end)
                await tensorhub.check_stamp(stamp, hub)
                samples.append(Sample(sample["value"], step, stamp))
        behind = sorted({step - each.stamp.version for each in samples[-BATCH:]})
        refusals = sum(refused for *_, refused in answers)
        say(f"step {step}: samples are {behind} versions old; {refusals} refusals")
    return samples, said


async def main(say: Callable[[str], object] = print) -> None:
    engine = Engine()
    async with (
        tensorhub.serve() as coordinator,
        tensorhub.connect(coordinator.address, name="trainer") as trainer,
        tensorhub.connect(coordinator.address, name="rollout") as rollout,
    ):
        weights = await rollout.register(MODEL, {"w": engine.weights}, spot=True)
        gate = VersionGate(engine, weights.stamp)
        config = uvicorn.Config(gate, lifespan="off", log_level="warning", ws="none")
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with anyio.create_task_group() as serving, anyio.create_task_group() as following:
                serving.start_soon(server.serve, [listener])
                following.start_soon(follow, rollout, weights, engine)
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                samples, said = await train(trainer, url, say)
                following.cancel_scope.cancel()
                server.should_exit = True
    for sample in samples:
        assert sample.trained - sample.stamp.version <= BOUND
        assert sample.value == said[sample.stamp.version], "its stamp names its weights"
    oldest = max(sample.trained - sample.stamp.version for sample in samples)
    say(f"{len(samples)} samples, none older than {oldest} versions, each as its stamp says")


if __name__ == "__main__":
    asyncio.run(main())

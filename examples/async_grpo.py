"""Asynchronous GRPO: a trainer, and three rollouts in processes of their own. A small transformer
learns to sort four digits, in about a minute on two cores.

    python -m examples.async_grpo

Each rollout brings its weights up to date between two batches, and stamps each sample with the
weights that made it. The trainer takes no sample that is more than two versions old (`--bound`).
After a third of the steps it kills one rollout with SIGKILL. The others go on; the killed one is
started again, fetches the newest version, and joins them, for which the run waits. In the end the
example tells reward, staleness and how long updates have kept rollouts from generating, and draws
them (`--plot`).

What TensorHub does is all in here. examples/grpo.py has the task, and examples/grpo_run.py the
processes; in earnest the rollouts are engines on other machines, and samples travel through a queue
of yours in place of pipes. Needs torch: `pip install 'tensorhub-ros[torch]'`.
"""

import asyncio
from multiprocessing.connection import Connection

import anyio
import torch

import tensorhub
from examples.grpo import Policy, generate, learn
from examples.grpo_run import Batch, Rollouts, Step, arguments, hand_over, tell

MODEL = "policy"
NAMES = ("rollout-0", "rollout-1", "rollout-2")
GROUPS = 64  # in a step, at least


def rollout(name: str, address: str, pipe: Connection) -> None:
    asyncio.run(roll_out(name, address, pipe))


async def roll_out(name: str, address: str, pipe: Connection) -> None:
    policy = Policy()
    async with tensorhub.connect(address, name=name) as hub:
        weights = await hub.register(MODEL, policy, group=name, spot=True)
        running, stalls = True, []
        while running:
            newest = hub.newest(MODEL)  # does no I/O
            if newest is None or newest.version != weights.version:
                report = await weights.update("latest")
                stalls.append((report.seconds, dict(report.phases)))
            groups = generate(policy, str(weights.stamp()))
            batch, stalls = Batch(groups, stalls), []
            running = await anyio.to_thread.run_sync(hand_over, pipe, batch)


async def train(hub: tensorhub.Hub, rollouts: Rollouts, steps: int, bound: int) -> list[Step]:
    policy, log = Policy(), list[Step]()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    weights = await hub.register(MODEL, policy)
    await weights.publish(1)
    recent = {weights.stamp().content_id: 1}  # the versions whose samples are taken
    while len(log) < steps or rollouts.away:
        number = len(log) + 1
        step = Step(number)
        while len(step.groups) < GROUPS:
            for name, batch in await anyio.to_thread.run_sync(rollouts.take):
                step.admit(name, batch, recent)
        step.reward = learn(policy, step.groups)  # rollouts may still read the weights
        async with weights.mutate(number + 1):
            optimizer.step()
        recent[weights.stamp().content_id] = number + 1
        if len(recent) > bound + 1:
            del recent[next(iter(recent))]  # the oldest
        if number == max(1, steps // 3):
            rollouts.kill(max(step.rollouts))
        step.news = rollouts.news()
        log.append(step)
        if number % 10 == 0 or step.news:
            print(step, flush=True)
    return log


async def main(steps: int, seed: int, bound: int, plot: str) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    async with (
        tensorhub.serve() as coordinator,
        tensorhub.connect(coordinator.address, name="trainer") as hub,
    ):
        with Rollouts(rollout, coordinator.address, NAMES, seed) as rollouts:
            log = await train(hub, rollouts, steps, bound)
    tell(log, plot)


if __name__ == "__main__":
    asyncio.run(main(**vars(arguments("async_grpo.svg"))))

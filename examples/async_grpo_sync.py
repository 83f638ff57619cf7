"""Asynchronous GRPO as in examples/async_grpo.py, with `tensorhub.sync`: for trainers and engines
without an event loop.

    python -m examples.async_grpo_sync

Each call blocks its own thread alone. In the processes of the rollouts and of the trainer TensorHub
has a thread of its own, which serves readers while Python computes. Needs torch:
`pip install 'tensorhub-ros[torch]'`.
"""

from multiprocessing.connection import Connection

import torch

from examples.grpo import Policy, generate, learn
from examples.grpo_run import Batch, Rollouts, Step, arguments, hand_over, tell
from tensorhub import sync

MODEL = "policy"
NAMES = ("rollout-0", "rollout-1", "rollout-2")
GROUPS = 64  # in a step, at least


def rollout(name: str, address: str, pipe: Connection) -> None:
    policy = Policy()
    with sync.connect(address, name=name) as hub:
        weights = hub.register(MODEL, policy, group=name, spot=True)
        running, stalls = True, []
        while running:
            newest = hub.newest(MODEL)  # does no I/O
            if newest is None or newest.version != weights.version:
                report = weights.update("latest")
                stalls.append((report.seconds, dict(report.phases)))
            groups = generate(policy, str(weights.stamp()))
            batch, stalls = Batch(groups, stalls), []
            running = hand_over(pipe, batch)


def train(hub: sync.Hub, rollouts: Rollouts, steps: int, bound: int) -> list[Step]:
    policy, log = Policy(), list[Step]()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    weights = hub.register(MODEL, policy)
    weights.publish(1)
    recent = {weights.stamp().content_id: 1}  # the versions whose samples are taken
    while len(log) < steps or rollouts.away:
        number = len(log) + 1
        step = Step(number)
        while len(step.groups) < GROUPS:
            for name, batch in rollouts.take():
                step.admit(name, batch, recent)
        step.reward = learn(policy, step.groups)  # rollouts may still read the weights
        with weights.mutate(number + 1):
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


def main(steps: int, seed: int, bound: int, plot: str) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    with (
        sync.serve() as coordinator,
        sync.connect(coordinator.address, name="trainer") as hub,
        Rollouts(rollout, coordinator.address, NAMES, seed) as rollouts,
    ):
        log = train(hub, rollouts, steps, bound)
    tell(log, plot)


if __name__ == "__main__":
    main(**vars(arguments("async_grpo_sync.svg")))

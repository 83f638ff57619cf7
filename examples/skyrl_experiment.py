"""An experiment of one's own for SkyRL, with vLLM engines that get the policy's weights by TensorHub.

    tensorhub serve --host 10.0.0.1 --port 17337
    export TENSORHUB_ADDRESS=tcp://10.0.0.1:17337   # on each node, before `ray start`
    python examples/skyrl_experiment.py trainer.policy.model.path=MODEL data.train_data="['train.parquet']"

The arguments are those of SkyRL's `main_base`. `install` is what TensorHub needs; without an
experiment of your own, `trainer.override_entrypoint=tensorhub.integrations.skyrl` does the same.

Needs SkyRL 0.3 with its vLLM, and `pip install 'tensorhub-ros[torch]'` on each node.
"""  # noqa: E501 - lines as they are typed

import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from tensorhub.integrations import skyrl


class Experiment(BasePPOExp):
    """Yours: SkyRL's methods that make datasets, generators and trainers."""


def run(cfg: SkyRLTrainConfig) -> None:
    skyrl.install(cfg)
    Experiment(cfg).run()


def main(*arguments: str) -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(list(arguments))
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(run).remote(cfg))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What is installed for each framework: the release that its adapter is tested with, without what
only a GPU needs.

torch and the development tools come from the environment for development, which each of these sees.
Written down is how each framework installs beside a torch for the CPU: with its own requirements,
some would bring gigabytes of CUDA along.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """`installs`: the arguments of one call of pip each. `tests`: modules in this directory. `base`:
    another environment, whose packages are seen behind those that are installed here. `module`: what
    the tests import; by default it has the recipe's name.
    """

    installs: tuple[str, ...]
    tests: tuple[str, ...]
    base: str | None = None
    module: str = ""

    @property
    def text(self) -> str:
        return "\n".join((*self.installs, *(() if self.base is None else (f"on {self.base}",))))

    @property
    def releases(self) -> list[str]:
        """Those that the recipe is about: what its first call of pip pins."""
        return re.findall(r"\S+==\S+", self.installs[0])


VLLM = (
    "-r tests/frameworks/vllm-requirements.txt mistral_common",
    "--no-deps xgrammar==0.2.8 apache-tvm-ffi==0.1.11 opencv-python-headless",
)
VLLM_TESTS = ("test_vllm.py", "test_vllm_worker.py")
# the oldest release and one between: with adapters and drafts, too
VLLM_MORE = ("test_vllm_worker.py", "test_vllm_draft.py", "test_vllm_lora.py")
RAY = ("test_ray.py", "test_ray_transport.py")
SGLANG = ("test_sglang.py", "test_sglang_quantized.py", "test_sglang_ranks.py")
SGLANG_MORE = ("test_sglang_draft.py", "test_sglang_lora.py", "test_sglang_sleep.py")
RECIPES = {
    # loaders without an adapter, which read a mounted version
    "fs": Recipe(
        ("transformers==5.24.0 diffusers==0.42.1 accelerate==1.15.0 mfusepy==3.1.1",),
        ("test_fs.py",),
        module="mfusepy",
    ),
    "ray": Recipe(("ray==2.60.0",), RAY),
    "ray-2.56": Recipe(("--no-deps ray==2.56.0",), RAY, base="ray"),
    "ray-2.55": Recipe(("--no-deps ray==2.55.0",), RAY, base="ray"),
    "sglang": Recipe(
        (
            "--no-deps sglang==0.5.23",
            "-r tests/frameworks/sglang-requirements.txt",
            (
                "--no-deps triton torchvision==0.28.0 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 "
                "outlines==0.1.11 timm==1.0.25"
            ),
        ),
        (*SGLANG, *SGLANG_MORE, "test_sglang_one_version.py", "test_fs_sglang.py"),
    ),
    "sglang-0.5.15": Recipe(
        (
            (
                "--no-deps sglang==0.5.15.post1 transformers==5.12.1 tokenizers==0.22.2 "
                "huggingface-hub==1.5.0 openai==2.6.1 xgrammar==0.2.1"
            ),
        ),
        SGLANG,
        base="sglang",
    ),
    "sglang-0.5.12": Recipe(
        (
            (
                "--no-deps sglang==0.5.12 transformers==5.6.0 tokenizers==0.22.2 "
                "huggingface-hub==1.5.0 openai==2.6.1 xgrammar==0.2.0 apache-tvm-ffi==0.1.9"
            ),
        ),
        SGLANG,
        base="sglang",
    ),
    "sglang-0.5.10": Recipe(
        (
            (
                "--no-deps sglang==0.5.10.post1 transformers==5.3.0 tokenizers==0.22.2 "
                "huggingface-hub==1.5.0 openai==2.6.1 xgrammar==0.1.32 apache-tvm-ffi==0.1.9 "
                "timm==1.0.16"
            ),
        ),
        SGLANG,
        base="sglang",
    ),
    "trl": Recipe(("trl==1.16.0 requests",), ("test_trl.py",)),
    "verl": Recipe(
        ("--no-deps verl==0.9.1", "-r tests/frameworks/verl-requirements.txt"),
        ("test_verl.py", "test_nemo_rl.py"),
    ),
    "vllm": Recipe(
        ("--no-deps vllm==0.33.0", *VLLM),
        (
            "test_vllm.py",
            "test_vllm_draft.py",
            "test_vllm_fleet.py",
            "test_vllm_layers.py",
            "test_vllm_lora.py",
            "test_vllm_lora_requests.py",
            "test_vllm_mtp.py",
            "test_vllm_one_version.py",
            "test_vllm_quant.py",
            "test_vllm_refusals.py",
            "test_vllm_republished.py",
            "test_vllm_requests.py",
            "test_vllm_restart.py",
            "test_vllm_server.py",
            "test_vllm_worker.py",
            "test_fs_vllm.py",
        ),
    ),
    "vllm-0.32": Recipe(("--no-deps vllm==0.32.0",), VLLM_TESTS, base="vllm"),
    "vllm-0.31": Recipe(
        ("--no-deps vllm==0.31.0",), ("test_vllm_worker.py",), base="vllm"
    ),  # TRL's newest
    "vllm-0.29": Recipe(  # OpenRLHF's
        ("--no-deps vllm==0.29.0 openai-harmony",), VLLM_MORE, base="vllm"
    ),
    "skyrl": Recipe(
        (
            "--no-deps skyrl==0.3.0 skyrl-gym vllm==0.23.0 ray==2.56.0 gguf",
            "--no-deps openai-harmony diskcache==5.6.3 loguru omegaconf tensordict pandas",
            "--no-deps antlr4-python3-runtime==4.9.3 peft accelerate datasets pytz six tzdata",
            "--no-deps python-dateutil jaxtyping wadler-lindig torchdata",
            "--no-deps multiprocess dill xxhash pyarrow",
        ),
        ("test_skyrl.py",),
        base="vllm",
    ),
    # flash-attn, which is for GPUs, is left out: the test has a stand-in
    "openrlhf": Recipe(
        (
            "--no-deps openrlhf==0.11.2 vllm==0.29.0 ray==2.55.0 deepspeed==0.19.6",
            "--no-deps openai-harmony hjson msgpack peft accelerate datasets torchdata",
            "--no-deps pandas pytz six tzdata python-dateutil multiprocess dill xxhash pyarrow",
            "--no-deps pylatexenc tensorboard",
        ),
        ("test_openrlhf.py",),
        base="vllm",
    ),
    # before the interface for weight transfer
    "vllm-0.24": Recipe(  # verl's
        ("--no-deps vllm==0.24.0 openai-harmony diskcache==5.6.3",),
        ("test_vllm_worker.py",),
        base="vllm",
    ),
    "vllm-0.23": Recipe(  # SkyRL's
        ("--no-deps vllm==0.23.0 openai-harmony diskcache==5.6.3 gguf",),
        ("test_vllm_worker.py",),
        base="vllm",
    ),
    "vllm-0.22": Recipe(  # TRL's oldest
        (
            "--no-deps vllm==0.22.1 openai-harmony diskcache==5.6.3 gguf",
            "--no-deps compressed-tensors==0.15.0.1",
        ),
        VLLM_MORE,
        base="vllm",
    ),
}

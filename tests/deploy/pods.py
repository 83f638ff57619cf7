"""Pods of the rendered manifests, run here as a kubelet would: a network namespace each, the pod's
user, environment, volumes and read-only root, and the command as process 1. The image is this
checkout with its Python.

As a program it is a container's first process, which makes the root and becomes the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from deploy.render import MANIFESTS
from tests.cli.processes import children, eventually

ROOT = Path(__file__).parents[2]
PYTHON = (sys.base_prefix, sys.prefix, os.path.realpath(sys.prefix))
IMAGE = ("/usr", "/bin", "/lib", "/lib64", "/etc", str(ROOT), *PYTHON)  # outer ones first
PROGRAM = (sys.executable, "-c", "from tensorhub.cli import main; main()")
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
CLONE_NEWNET = 0x40000000
UNITS = {"Mi": 2**20, "Gi": 2**30}

T = TypeVar("T")


def templates(manifest: str) -> dict[str, Any]:
    """The pods of a file in deploy/kubernetes, by the names of their workloads."""
    found = yaml.safe_load_all((MANIFESTS / manifest).read_text(encoding="utf-8"))
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in found
        if each["kind"] in ("StatefulSet", "Deployment")
    }


@dataclass
class Node:
    """What pods share: a network, and what a kubelet mounts and tells."""

    directory: Path
    secrets: Mapping[str, Mapping[str, bytes]]  # by name, by key
    environment: Mapping[str, str] = field(default_factory=dict)  # of every container
    hosts: dict[str, str] = field(default_factory=dict)  # further names, and their addresses
    prefix: str = f"pods{os.getpid()}"  # of network namespaces
    addresses: dict[str, str] = field(default_factory=dict)  # of pods, and of "client"

    def attach(self, name: str) -> None:
        """A namespace for that pod, reached as Services would be."""
        if name not in self.addresses:
            at, number = f"{self.prefix}-{name}", len(self.addresses) + 1
            self.addresses[name] = f"192.0.2.{number}"
            _ip("netns", "add", at)
            link = ("type", "veth", "peer", "name", f"p{number}", "netns", self.prefix)
            _ip("-n", at, "link", "add", "eth0", *link)
            _ip("-n", self.prefix, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", at, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", at, "link", "set", device, "up")

    def inside(self, name: str, body: Callable[[], T]) -> T:
        """What `body` gives in that namespace, with all threads that it starts there."""
        outcome: list[T | BaseException] = []

        def run() -> None:
            try:
                with open(f"/run/netns/{self.prefix}-{name}") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                outcome.append(body())
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        (done,) = outcome
        if isinstance(done, BaseException):
            raise done
        return done

    @contextlib.contextmanager
    def run(self, name: str, template: Any) -> Iterator[Pod]:
        """That pod, until the end of the block, which kills what is left of it."""
        self.attach(name)
        spec = template["spec"]
        (container,) = spec["containers"]
        environment = self._environment(name, template, container)
        arguments = [
            re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], each)
            for each in container["args"]
        ]
        group = str(spec["securityContext"]["fsGroup"])
        plan = {
            "mounts": dict(self._mounts(spec, container)),
            "become": (
                "setpriv",
                *(f"--reuid={spec['securityContext']['runAsUser']}", f"--regid={group}"),
                *(f"--groups={group}", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
                *("env", "-i", *(f"{key}={value}" for key, value in environment.items())),
                *(*PROGRAM, *arguments),
            ),
        }
        enter = ("ip", "netns", "exec", f"{self.prefix}-{name}")
        isolated = ("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL")
        process = subprocess.Popen(
            [*enter, *isolated, sys.executable, "-m", __name__, json.dumps(plan)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield Pod(process, spec["terminationGracePeriodSeconds"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _environment(self, name: str, template: Any, container: Any) -> dict[str, str]:
        fields = {"metadata.name": name, "spec.nodeName": "node-1"}
        found = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}/src:{ROOT}", **self.environment}
        for each in container["env"]:
            match each.get("valueFrom", {"value": each.get("value")}):
                case {"value": value}:
                    found[each["name"]] = value
                case {"fieldRef": {"fieldPath": path}}:  # of a pod without topology labels
                    found[each["name"]] = fields.get(path, "")
                case {"secretKeyRef": {"name": secret, "key": key, "optional": True}}:
                    if key in self.secrets[secret]:
                        found[each["name"]] = self.secrets[secret][key].decode()
                case {"resourceFieldRef": {"resource": "limits.memory", "divisor": divisor}}:
                    limit = container["resources"]["limits"]["memory"]
                    nbytes = int(limit[:-2]) * UNITS[limit[-2:]]
                    found[each["name"]] = str(nbytes // (int(divisor[:-2]) * UNITS[divisor[-2:]]))
        return found

    def _mounts(self, spec: Any, container: Any) -> Iterator[tuple[str, str]]:
        group = spec["securityContext"]["fsGroup"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if "secret" in volume:
                secret = volume["secret"]
                files = self.secrets[secret["secretName"]]
                directory = self._secret(files, secret["defaultMode"], group)
            elif "emptyDir" in volume:
                directory = Path(tempfile.mkdtemp(dir=self.directory))
                directory.chmod(0o2777)
            else:  # a claim
                directory = self.directory / mount["name"]
                directory.mkdir(exist_ok=True)
                os.chown(directory, 0, group)
                directory.chmod(0o2775)
            yield mount["mountPath"], str(directory)
        if spec["automountServiceAccountToken"]:
            yield ACCOUNT, str(self._secret(self.secrets["account"], 0o440, group))
        hosts = self.directory / "hosts"
        named = {f"{pod}.tensorhub.svc": at for pod, at in self.addresses.items()} | self.hosts
        hosts.write_text("".join(f"{at} {name}\n" for name, at in named.items()))
        yield "/etc/hosts", str(hosts)

    def _secret(self, files: Mapping[str, bytes], mode: int, group: int) -> Path:
        """As a kubelet mounts it: files of root and the pod's group, behind two links."""
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        directory.chmod(0o755)
        (directory / "..1").mkdir()
        (directory / "..data").symlink_to("..1")
        for key, content in files.items():
            (directory / "..1" / key).write_bytes(content)
            os.chown(directory / "..1" / key, 0, group)
            (directory / "..1" / key).chmod(mode)
            (directory / key).symlink_to(f"..data/{key}")
        return directory


@dataclass
class Pod:
    process: subprocess.Popen[str]
    grace_s: float

    def end(self) -> int | None:
        """Its exit code after SIGTERM; None: it has used up its grace period."""
        os.kill(self._first(), signal.SIGTERM)
        ended = eventually(lambda: self.process.poll() is not None, self.grace_s)
        return self.process.returncode if ended else None

    def _first(self) -> int:
        (first,) = children(self.process.pid)
        return first


@contextlib.contextmanager
def node(directory: Path, secrets: Mapping[str, Mapping[str, bytes]], **env: str) -> Iterator[Node]:
    made = Node(directory, secrets, env)
    try:
        _ip("netns", "add", made.prefix)
        _ip("-n", made.prefix, "link", "add", "br0", "type", "bridge")
        _ip("-n", made.prefix, "link", "set", "br0", "up")
        made.attach("client")
        yield made
    finally:
        for name in [f"{made.prefix}-{each}" for each in made.addresses] + [made.prefix]:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=60)


def become(plan: Any) -> None:
    """Make a root of the image and the volumes, read-only but for these, and run the command."""
    root = "/run/pod-root"
    os.makedirs(root, exist_ok=True)
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", "mode=755", "pod", root)

    def take(paths: Sequence[str]) -> None:
        for path in paths:
            if os.path.isdir(path) and not os.path.exists(f"{root}{path}/."):
                os.makedirs(root + path, exist_ok=True)
                _mount("--rbind", path, root + path)

    take(IMAGE)
    for path in ("/proc", "/dev"):
        os.makedirs(root + path, exist_ok=True)
    _mount("-t", "proc", "proc", f"{root}/proc")
    _mount("--rbind", "/dev", f"{root}/dev")
    for path, source in plan["mounts"].items():
        if os.path.isdir(source):
            os.makedirs(root + path, exist_ok=True)
        _mount("--bind", source, root + path)
    take(IMAGE)  # again: a checkout below /tmp is hidden by the pod's own /tmp
    _mount("-o", "remount,ro", root)
    os.execvp("chroot", ("chroot", root, *plan["become"]))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=60)


if __name__ == "__main__":
    become(json.loads(sys.argv[1]))

"""Runs m3pc commands as jobs of a Ray cluster; they continue when the terminal is closed."""

import asyncio
import logging
import os
import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from m3pc.core.token_file import MODE, PATH
from m3pc.types import InputError

ADDRESS = "http://127.0.0.1:8265"
STOP_SECONDS = 90  # a stopped job may store its episodes and save for so long before Ray kills it
JOB_ID = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
# Not uploaded with the code; nor is anything that .gitignore names.
EXCLUDED = [".git", ".venv", "/runs", "/data", "/tests", "/docs"]
CLUSTER_COMMANDS = ("finetune", "resume")  # these connect to the cluster by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted command, as Ray's job server reports it."""

    id: str
    status: str  # PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
    command: str
    message: str = ""
    code: int | None = None  # exit code of the command

    @property
    def ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


def entrypoint(words: Sequence[str], folder: Path) -> str:
    """A shell line that runs the command with the uploaded code. `folder` is the working folder:
    all machines see it, so relative paths mean the same on each."""
    command = list(words)
    joins = command[0] in CLUSTER_COMMANDS and not {"--address", "--local"} & {
        word.partition("=")[0] for word in command
    }
    if joins:
        command += ["--address", "auto"]
    where = shlex.quote(str(folder))
    absent = f"error: {folder} is not on the head; give a folder that all machines see, by --in"
    return (
        'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"; '
        f"cd {where} || {{ echo {shlex.quote(absent)} >&2; exit 2; }}; "
        f"exec python -P -m m3pc {shlex.join(command)}"
    )


class Jobs:
    """The jobs of one cluster."""

    def __init__(self, address: str) -> None:
        if urlsplit(address).scheme not in ("http", "https"):
            raise InputError(
                f"the address of a cluster's jobs is {address!r}; expected that of its dashboard, "
                f"such as {ADDRESS}"
            )
        if os.environ.get(PATH):
            os.environ.setdefault(MODE, "token")
        from ray.job_submission import JobSubmissionClient

        for name in ("", ".dashboard.modules.dashboard_sdk", ".dashboard.modules.job.sdk"):
            logging.getLogger(f"ray{name}").setLevel(logging.ERROR)  # they would log requests
        self._address = address
        with self._explained():
            self._client = cast(Any, JobSubmissionClient)(address)

    def submit(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        code: Path | None,
        environment: Mapping[str, str],
        job: str = "",
    ) -> str:
        """Return the new job's id. `code` is uploaded; None: the cluster has m3pc installed."""
        name = _checked(job or f"{words[0]}-{secrets.token_hex(4)}")
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **environment}
        runtime_env: dict[str, Any] = {"env_vars": variables}
        if code is not None:
            runtime_env |= {"working_dir": str(code), "excludes": EXCLUDED}
        with self._explained():
            job_id: str = self._client.submit_job(
                entrypoint=entrypoint(words, folder), submission_id=name, runtime_env=runtime_env
            )
        return job_id

    def find(self, job: str) -> Job:
        with self._explained():
            return _job(self._client.get_job_info(_checked(job)))

    def all(self) -> list[Job]:
        """All jobs, the newest first."""
        with self._explained():
            jobs = [info for info in self._client.list_jobs() if info.submission_id]
        return [_job(info) for info in sorted(jobs, key=lambda info: -(info.start_time or 0))]

    def stop(self, job: str) -> bool:
        """Ask a job to stop, without waiting. Return whether it was running."""
        with self._explained():
            return bool(self._client.stop_job(_checked(job)))

    def log(self, job: str) -> str:
        with self._explained():
            return str(self._client.get_job_logs(_checked(job)))

    def follow(self, job: str, show: Callable[[str], None]) -> Job:
        """Show the output of a job until it ends."""

        async def tail() -> None:
            async for text in self._client.tail_job_logs(_checked(job)):
                show(text)

        with self._explained():
            asyncio.run(tail())
        return self.find(job)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn Ray's errors into InputErrors that say what to do."""
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            raise InputError(
                f"no entry to the cluster at {self._address}: {_first_line(error)}; name "
                f"the file with its token by {PATH}"
            ) from None
        except ConnectionError as error:
            raise InputError(
                f"no cluster answers at {self._address}: {_first_line(error)}; start one with "
                "m3pc node head, or open a tunnel to its dashboard"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise InputError(f"the cluster at {self._address} says: {_last_line(error)}") from None


def variables(assignments: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE, or NAME alone for its value in this environment, which keeps secrets out
    of the shell's history."""
    environment = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not NAME.fullmatch(name):
            raise InputError(f"--env is {text!r}; give NAME=VALUE, or NAME for its value here")
        if not equals and name not in os.environ:
            raise InputError(f"--env names {name}, which is not set here; set it or give a value")
        environment[name] = value if equals else os.environ[name]
    return environment


def _checked(job: str) -> str:
    """Refuse ids that are unsafe in URLs and file names."""
    if not JOB_ID.fullmatch(job):
        raise InputError(f"a job's id is {job!r}; give letters, digits, and . _ - inside")
    return job


def _job(info: Any) -> Job:
    return Job(
        id=info.submission_id,
        status=str(getattr(info.status, "value", info.status)),
        command=info.entrypoint.rpartition("exec python -P -m ")[2],
        message=info.message or "",
        code=info.driver_exit_code,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:500]

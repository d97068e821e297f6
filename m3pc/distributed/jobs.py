"""Commands of m3pc as jobs of a Ray cluster, which runs them while nobody watches."""

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
# Seconds that a job has to end in order before Ray kills it: a run stores what it has and saves.
STOP_SECONDS = 90
JOB_ID = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
# Not sent along with the code; what .gitignore names is not, either.
LEFT_OUT = [".git", ".venv", "/runs", "/data", "/tests", "/docs"]
ON_A_CLUSTER = ("finetune", "resume")  # commands that join it, unless they say what to join


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    status: str  # PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
    command: str
    message: str = ""
    code: int | None = None  # with which its command ended

    @property
    def ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


def entrypoint(words: Sequence[str], folder: Path) -> str:
    """One line for a shell: the command with the code that was sent along, in a folder where its
    paths mean on the cluster what they mean here."""
    command = list(words)
    joins = command[0] in ON_A_CLUSTER and not {"--address", "--local"} & {
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
    """Of one cluster."""

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
            logging.getLogger(f"ray{name}").setLevel(logging.ERROR)  # they tell what they send
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
        """Its id. `code` is the folder that is sent along; without it the cluster has its own."""
        name = _checked(job or f"{words[0]}-{secrets.token_hex(4)}")
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **environment}
        surroundings: dict[str, Any] = {"env_vars": variables}
        if code is not None:
            surroundings |= {"working_dir": str(code), "excludes": LEFT_OUT}
        with self._explained():
            found: str = self._client.submit_job(
                entrypoint=entrypoint(words, folder), submission_id=name, runtime_env=surroundings
            )
        return found

    def find(self, job: str) -> Job:
        with self._explained():
            return _job(self._client.get_job_info(_checked(job)))

    def all(self) -> list[Job]:
        """The newest first."""
        with self._explained():
            found = self._client.list_jobs()
        submitted = [each for each in found if each.submission_id]
        return [_job(each) for each in sorted(submitted, key=lambda each: -(each.start_time or 0))]

    def stop(self, job: str) -> bool:
        """Whether it ran. It is told, not waited for."""
        with self._explained():
            return bool(self._client.stop_job(_checked(job)))

    def log(self, job: str) -> str:
        with self._explained():
            return str(self._client.get_job_logs(_checked(job)))

    def follow(self, job: str, show: Callable[[str], None]) -> Job:
        """Show what it prints until it ends."""

        async def tail() -> None:
            async for text in self._client.tail_job_logs(_checked(job)):
                show(text)

        with self._explained():
            asyncio.run(tail())
        return self.find(job)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Ray's errors in a sentence that says what to do."""
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


def variables(given: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE as given, or NAME with its value in this shell, which keeps no history of it."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not NAME.fullmatch(name):
            raise InputError(f"--env is {text!r}; give NAME=VALUE, or NAME for its value here")
        if not equals and name not in os.environ:
            raise InputError(f"--env names {name}, which is not set here; set it or give a value")
        found[name] = value if equals else os.environ[name]
    return found


def _checked(job: str) -> str:
    """Ids are parts of URLs and of file names."""
    if not JOB_ID.fullmatch(job):
        raise InputError(f"a job's id is {job!r}; give letters, digits, and . _ - inside")
    return job


def _job(found: Any) -> Job:
    return Job(
        id=found.submission_id,
        status=str(getattr(found.status, "value", found.status)),
        command=found.entrypoint.rpartition("exec python -P -m ")[2],
        message=found.message or "",
        code=found.driver_exit_code,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:500]

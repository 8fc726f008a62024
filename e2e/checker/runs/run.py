"""A run: load on a real system, a disturbance, and a verdict over the history of the clients.

The caller chooses the disturbance: a module of checker.faults, such as kills.py or walk.py (named points).
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import httpx
import redis.asyncio
import redis.exceptions

from checker.clients.client import CallProgress, Client
from checker.clients.workload import PlannedCall, plan_calls
from checker.history.answers import requested_choices
from checker.history.offers import read_offers
from checker.history.records import Expected, HistoryWriter, Opening, Sample, SystemEnded
from checker.history.system_logs import read_deaths, read_iterations, read_logs
from checker.oracles.expectations import chain_expectations, undisturbed_expectations
from checker.points.names import FOLDER_VARIABLE, MUTANT_VARIABLE
from checker.rules.growth import Growth, growth_table, measure_growth
from checker.rules.judging_history import JudgingHistory
from checker.rules.repairs import measure_repairs, repair_table
from checker.rules.verdict import Verdict, judge, table, tokenizer_decode
from checker.runs.context import RunContext, RunSettings
from checker.systems.pool_reader import connect, read_log
from checker.systems.resources import read_resources
from checker.systems.system import System, SystemFailure, can_repeat, can_resume, poll

RETENTION_S = 60
"""Retention of ended requests: short enough to expire before a run ends, and long enough for a client that waits for a
gateway."""

LOG_WITHIN_S = 600.0
"""Longest time between the end of a call and the end of its log. It is as long as the client's own patience, because on
a shared machine a client may leave while one repair follows another."""


async def run_system(settings: RunSettings, report: Callable[[str], None]) -> Verdict:
    """Start a system, disturb it, and judge. Raises: SystemFailure if it does not start."""
    retention = str(RETENTION_S * 1000)
    environment = {
        "ORCA_POOL_RETENTION_MS": retention,
        "ORCA_POOL_RETENTION_LEAST_MS": retention,
        # On a shared machine a rank may take minutes to import torch.
        "ORCA_WORKER_LOADING_SILENT_S": "600",
    }
    environment |= settings.environment
    if settings.injects:
        environment |= _injection(settings)
    flags = ("--model", str(settings.model), "--dtype", "float32", *settings.up)
    with _make_history(settings) as history:
        async with (
            settings.make_system(settings.folder / "system", flags, environment=environment) as system,
            _http_client() as http,
        ):
            pool = connect(system.addresses["redis"])
            run = _Run(settings, history, system, http, pool, report)
            try:
                await run.all()
            finally:
                await pool.aclose()
    return _conclude(settings, history, report)


def _make_history(settings: RunSettings) -> HistoryWriter:
    path = settings.folder / "history.jsonl"
    if settings.least_life_s is None:
        return HistoryWriter(path)
    return JudgingHistory(path, tokenizer_decode(settings.model / "tokenizer.json"))


def _injection(settings: RunSettings) -> dict[str, str]:
    """Return the variables with which Python loads checker.points in every process of the system."""
    inject = settings.folder / "inject"
    inject.mkdir(parents=True, exist_ok=True)
    checker = Path(__file__).parents[1]
    paths = [str(checker / "points" / "inject"), str(checker.parent), os.environ.get("PYTHONPATH", "")]
    variables = {FOLDER_VARIABLE: str(inject), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return variables | ({MUTANT_VARIABLE: settings.mutant} if settings.mutant is not None else {})


def _http_client() -> httpx.AsyncClient:
    """Return a client without a bound on connections, and without a limit on silence, which is what a run measures."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=limits)


class _Run:
    """The parts of one run, in order."""

    def __init__(
        self,
        settings: RunSettings,
        history: HistoryWriter,
        system: System,
        http: httpx.AsyncClient,
        pool: redis.asyncio.Redis,
        report: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._history = history
        self._system = system
        self._http = http
        self._pool = pool
        self._report = report
        self._load_is_over = False
        self._expected: dict[str, list[Expected]] = {}
        self._began = 0.0

    async def all(self) -> None:
        settings, history = self._settings, self._history
        opening = Opening(
            at=time.monotonic(),
            seed=settings.seed,
            wall_s=time.time(),
            settings={"roles": settings.roles, "model": settings.model.name, "mutant": settings.mutant}
            | ({} if settings.least_life_s is None else {"least_life_s": settings.least_life_s}),
            tokenizer=str(settings.model / "tokenizer.json"),
        )
        history.add(opening)
        roles, resumes = await self._server_abilities()
        plans = self._plans(resumes)
        await self._expect(plans)
        await self._come_to_rest("before")
        self._began = time.monotonic()
        try:
            # An HTTP client for the load alone: its open connections would otherwise count on the gateway afterwards.
            async with _http_client() as http:
                client = Client(self._system.urls, http, history, seed=settings.seed, can_resume=resumes)
                await self._load_and_disturb(client, plans, roles)
            await self._come_to_rest("after")
        except* SystemFailure as broken:
            history.add(SystemEnded(at=time.monotonic(), words=_end_of_output(broken)))
        if (offers := read_offers(settings.folder / "inject", at=time.monotonic())) is not None:
            history.add(offers)
        for record in (*read_logs(self._system.logs, opening), *read_deaths(self._system.output, opening)):
            if record.at > opening.at:
                history.add(record)

    async def _server_abilities(self) -> tuple[tuple[str, ...], bool]:
        """Return the roles to disturb, and True if broken streams can resume. Report everything that is left out."""
        settings, url = self._settings, self._system.url
        resumes = await can_resume(self._http, url)
        if not await can_repeat(self._http, url, settings.prompt_source.model):
            self._report("the server does not support Idempotency-Key: a broken POST is computed twice")
        roles = settings.roles
        if not resumes:
            roles = tuple(role for role in roles if role != "gateway")
            self._report("the server cannot resume streams (GET /v1/requests/{id}/events): no faults to the gateway")
        return roles, resumes

    def _plans(self, resumes: bool) -> list[PlannedCall]:
        settings = self._settings
        return plan_calls(
            settings.prompt_source,
            seed=settings.seed,
            count=settings.distinct_calls,
            rate=settings.rate,
            max_tokens=settings.max_tokens,
            drops=resumes,
            deadlines=settings.deadlines,
        )

    async def _expect(self, plans: Sequence[PlannedCall]) -> None:
        settings, at = self._settings, time.monotonic()
        if settings.is_chain:
            found = await asyncio.to_thread(chain_expectations, settings.model, plans, at=at)
        else:
            # A call with a grammar that is not taken yet has no expected answer, but it must match its grammar.
            taken = [plan for plan in plans if self._system.takes_grammars or not plan.has_grammar]
            found = await undisturbed_expectations(
                self._system.url, self._http, taken, settings.folder, seed=settings.seed, at=at
            )
        for expected in found:
            self._expected.setdefault(expected.call, []).append(expected)
        self._report(f"{len(found)} outputs expected, by {'the oracle' if settings.is_chain else 'an undisturbed run'}")

    async def _load_and_disturb(self, client: Client, plans: Sequence[PlannedCall], roles: tuple[str, ...]) -> None:
        settings = self._settings
        context = RunContext(
            settings=settings,
            system=self._system,
            history=self._history,
            client=client,
            http=self._http,
            pool=self._pool,
            plans=plans,
            run_call=lambda plan: self._run_call(client, plan),
            roles=roles,
            inject=settings.folder / "inject",
            report=self._report,
        )
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(self._load(client, plans))
            try:
                await settings.disturb(context)
            finally:
                self._load_is_over = True
            await loading

    async def _load(self, client: Client, plans: Sequence[PlannedCall]) -> None:
        """Make calls at their times, round after round until the faults are done, each to the end of its log."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as calls:
            for plan in _rounds(plans):
                while self._is_early(client, began + plan.due_s) and not self._load_is_over:
                    await asyncio.sleep(0.02)
                if self._load_is_over:
                    return
                if plan.has_grammar and not self._system.takes_grammars:
                    continue
                calls.create_task(self._run_call(client, plan))
                await asyncio.sleep(0)  # let the call start, so that it counts as open

    def _is_early(self, client: Client, due: float) -> bool:
        return time.monotonic() < due or client.open_calls >= self._settings.open_max

    async def _run_call(self, client: Client, plan: PlannedCall) -> CallProgress:
        for expected in self._expected.get(plan.name.partition("~")[0], ()):
            self._history.add(replace(expected, call=plan.name))
        progress = await client.call(plan)
        if progress.request_id is not None:
            for choice in range(requested_choices(plan.body)):
                await self._read_log(f"{progress.request_id}.{choice}")
        self._history.finish(plan.name)
        return progress

    async def _read_log(self, request: str) -> None:
        """Record the log when it has its end, or as it is after `LOG_WITHIN_S`."""
        ends = time.monotonic() + LOG_WITHIN_S
        while True:
            try:
                log = await read_log(self._pool, request, at=time.monotonic())
            except redis.exceptions.RedisError:
                log = None
            is_late = time.monotonic() > ends
            if log is not None and (log.reason is not None or is_late):
                self._history.add(log)
            if is_late or (log is not None and log.reason is not None):
                return
            await asyncio.sleep(0.2)

    async def _come_to_rest(self, moment: str) -> None:
        """Wait until the system is at rest, at most for the retention and the leases; then record its resources."""
        last = None

        async def is_at_rest() -> bool:
            nonlocal last
            found = await read_resources(moment, self._system, self._http, self._pool)
            last = found or last  # a part may not answer the last poll
            return found is not None and not any(
                value for name, value in found.held.items() if _must_be_zero_at_rest(name)
            )

        await poll(is_at_rest, RETENTION_S + 30.0)
        assert last is not None, f"a part of the system does not answer {moment} the load"
        self._history.add(last)
        if moment == "after":
            self._history.add(read_iterations(self._system.iterations, since=self._began, at=time.monotonic()))


def _rounds(plans: Sequence[PlannedCall]) -> Iterator[PlannedCall]:
    """Yield the planned calls, then the same calls again with new names: `c3`, `c3~1`, `c3~2`."""
    for number in count():
        for plan in plans:
            name = f"{plan.name}~{number}" if number else plan.name
            yield replace(plan, name=name, due_s=plan.due_s + number * plans[-1].due_s)


def _end_of_output(broken: BaseExceptionGroup[SystemFailure]) -> str:
    first = broken.exceptions[0]
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return str(first)[-1500:]


def _must_be_zero_at_rest(name: str) -> bool:
    return not name.startswith("open_files")


def _conclude(settings: RunSettings, history: HistoryWriter, report: Callable[[str], None]) -> Verdict:
    if isinstance(history, JudgingHistory):
        verdict = history.verdict()
    else:
        verdict = judge(history.records, tokenizer_decode(settings.model / "tokenizer.json"))
    repairs, growths = measure_repairs(history.records), _growths(settings, history)
    path = settings.folder / "verdict.json"
    document = {"verdict": verdict.as_json(), "repairs": [asdict(repair) for repair in repairs]}
    document["growths"] = [asdict(growth) for growth in growths]
    path.write_text(json.dumps(document, indent=2))
    tables = [table(verdict), repair_table(repairs)]
    if settings.least_life_s is not None:
        tables.append(growth_table(growths))
    report("\n" + "\n\n".join([*tables, f"history and verdict: {settings.folder}"]))
    return verdict


def _growths(settings: RunSettings, history: HistoryWriter) -> list[Growth]:
    samples = [record for record in history.records if isinstance(record, Sample)]
    return measure_growth(samples, least_life_s=settings.least_life_s or 0.0)

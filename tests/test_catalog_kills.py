"""A minute of many processes at one store and one catalog, some of them killed: nothing is lost, torn, or held twice.

Sixteen append to shared ledgers under claims, eight sync and read; killers end both kinds without warning.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest
from catalog_builders import python
from pipeline_builders import add_tiny_base
from store_builders import SeaweedFS

from roster.catalog import open_catalog
from roster.serving import Roster
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.keys import roster_key
from storage.ledger import Ledger
from storage.s3 import S3Store
from tasks.cataloguing import SyncLimits, sync_catalog

pytestmark = pytest.mark.real

SECONDS, APPENDERS, SYNCERS, LEDGERS = 60, 16, 8, 6
TABLES = (
    "ledgers",
    "submissions",
    "steps",
    "judgements",
    "figures",
    "bases",
    "author_events",
    "ready",
    "adapters",
)

# One process that has everything imported, and forks a child for each line it is told: `<role> <name> <end>`.
NURSERY = """
import json, os, random, signal, sys, time, traceback
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from ledger_builders import whole_path
from roster.catalog import open_catalog
from roster.errors import CatalogBusy, CatalogMissing
from storage.claims import open_ledger
from storage.errors import ClaimHeld, ClaimLost, LedgerBusy
from storage.ledger import Step, SubmissionRef
from storage.s3 import S3Store
from tasks.cataloguing import SyncLimits, sync_catalog

endpoint, access_key, secret_key, folder, ledgers = *sys.argv[1:4], Path(sys.argv[4]), int(sys.argv[5])
catalog = folder / "home" / "catalog.duckdb"

def tell(**fact):
    log.write(json.dumps(fact) + "\\n")  # one write: a kill leaves it whole or out

def append(store, name, end):
    # Tells what it is about to append, and afterwards that it did: all of the latter must be in the ledgers.
    number = 0
    while time.time() < end:
        author = f"author-{random.randrange(ledgers)}"
        submission = SubmissionRef(run="run-1", submission="2026-03-01T10:00:00Z-0a1b2c3d")
        try:
            ledger = open_ledger(store, author, sha256(author.encode()).hexdigest(), "tiny", submission)
            ledger.claim(name, CLAIM_S)
            since = time.time()
            steps = whole_path(author, sha256(f"output {author}".encode()).hexdigest())
            for step in random.sample(steps, 2) + steps[-1:]:
                number += 1
                mark = f"{name}/{number}"
                tell(wants=mark)
                ledger.append(Step.model_validate({**step, "worker": mark}))
                tell(did=mark)
            tell(held=author, since=since, until=min(time.time(), since + CLAIM_S))
            ledger.release()
        except (ClaimHeld, ClaimLost, LedgerBusy) as error:
            time.sleep(random.random() / 10)

def sync(store, name, end):
    # What it reads must be of one piece: as many steps as the ledgers say, none without its ledger.
    while time.time() < end:
        touched = [f"ledger/author-{random.randrange(ledgers)}/_author.json"] if random.random() < 0.7 else None
        try:
            synced = sync_catalog(store, catalog, SyncLimits(4, 1.0), touched=touched)
            tell(synced=synced.report.total, whole=synced.whole, rebuilt=synced.report.rebuilt)
        except (CatalogBusy, LedgerBusy) as error:
            tell(gave_way=type(error).__name__)
        try:
            with open_catalog(catalog) as reader:
                [(said,)] = reader.sql("SELECT sum(steps) FROM ledgers").rows
                [(found,)] = reader.sql("SELECT count(*) FROM steps").rows
                [(orphans,)] = reader.sql("SELECT count(*) FROM steps WHERE key NOT IN (SELECT key FROM ledgers)").rows
                served = {row.author for row in reader.ready()}
            tell(read=found, torn=bool((said or 0) != found or orphans or not served and found > 500))
        except CatalogMissing:
            pass

CLAIM_S = 3
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("there", flush=True)
for line in sys.stdin:
    role, name, end = line.split()
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    log = (folder / f"{name}.log").open("a", buffering=1)
    store = S3Store.open(
        endpoint=endpoint, bucket="shared", region="us-east-1", access_key=access_key, secret_key=secret_key
    )
    try:
        {"append": append, "sync": sync}[role](store, name, float(end))
    except BaseException:
        tell(failed=traceback.format_exc())
    finally:
        os._exit(0)
"""


def facts(folder: Path) -> Iterator[dict[str, object]]:
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text().splitlines():
            yield json.loads(line)


def rows(path: Path, table: str) -> tuple[tuple[object, ...], ...]:
    with open_catalog(path) as reader:
        return reader.sql(f"SELECT * FROM {table} ORDER BY ALL").rows


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def play(server: SeaweedFS, folder: Path, chance: random.Random) -> int:
    """Keep all of them at work for a minute, whoever is killed; how many were killed while they synced."""
    lock = folder / "home" / "catalog.duckdb.lock"
    lock.parent.mkdir()
    access = (server.endpoint, server.access_key, server.secret_key)
    with python(NURSERY, *access, str(folder), str(LEDGERS)) as nursery:
        assert nursery.stdout is not None and nursery.stdin is not None
        assert nursery.stdout.readline() == "there\n"
        end, names, killed = time.time() + SECONDS, count(), 0

        def start(role: str) -> int:
            assert nursery.stdout is not None and nursery.stdin is not None
            nursery.stdin.write(f"{role} {role}-{next(names)} {end}\n")
            nursery.stdin.flush()
            return int(nursery.stdout.readline())

        at_work = {start(role): role for role in ["append"] * APPENDERS + ["sync"] * SYNCERS}
        try:
            while time.time() < end - 5:
                time.sleep(chance.uniform(0.5, 3))
                holder = lock.read_text().strip() if lock.exists() else ""
                syncing = [process for process in at_work if str(process) == holder]
                victim = syncing[0] if syncing and chance.random() < 0.5 else chance.choice([*at_work])
                os.kill(victim, signal.SIGKILL)
                killed += victim in syncing
                role = at_work.pop(victim)
                at_work[start(role)] = role
            deadline = time.time() + 120
            while any(map(is_alive, at_work)):
                assert time.time() < deadline, "somebody does not come to an end"
                time.sleep(0.2)
        finally:
            for process in filter(is_alive, at_work):
                os.kill(process, signal.SIGKILL)
            nursery.stdin.close()
    return killed


def test_a_minute_of_appends_syncs_and_kills(server: SeaweedFS, tmp_path: Path) -> None:
    store = server.open("shared")
    add_tiny_base(store)
    killed = play(server, tmp_path, random.Random(7))
    told = list(facts(tmp_path))
    ledgers = {one.key: read_document(store, one.key, Ledger)[0] for one in list_ledgers(store)}
    assert [fact["failed"] for fact in told if "failed" in fact] == []
    check_appends(told, ledgers)
    check_claims(told)
    synced = [fact for fact in told if "synced" in fact]
    # Two cores that have nothing else to do: 13 killed while they synced, 15 syncs that ended, 3 of touched authors.
    assert killed >= 5 and len(synced) >= 8, (killed, len(synced))
    assert len(synced) < 20 or {fact["whole"] for fact in synced} == {True, False}
    touched = sum(not fact["whole"] for fact in synced)
    print(f"{len(told)} facts, {len(synced)} syncs, {touched} of touched authors, {killed} killed")
    rebuilds = [fact["rebuilt"] for fact in synced if fact["rebuilt"]]
    assert set(rebuilds) <= {"there was no catalog"}, "a kill never damaged the catalog"
    assert not any(fact.get("torn") for fact in told) and sum("torn" in fact for fact in told) >= 5
    check_catalogs(store, tmp_path)


def check_appends(told: list[dict[str, object]], ledgers: dict[str, Ledger]) -> None:
    """Every append that was told of is there once, and nothing that nobody wanted."""
    found = Counter(step.worker for ledger in ledgers.values() for step in ledger.steps)
    did = {str(fact["did"]) for fact in told if "did" in fact}
    wanted = {str(fact["wants"]) for fact in told if "wants" in fact}
    assert len(did) > 100 and did <= set(found) <= wanted
    assert set(found.values()) == {1}


def check_claims(told: list[dict[str, object]]) -> None:
    """No two held one ledger at one time; the clocks are one machine's."""
    held: dict[str, list[tuple[float, float]]] = {}
    for fact in told:
        if "held" in fact:
            span = float(str(fact["since"])), float(str(fact["until"]))
            held.setdefault(str(fact["held"]), []).append(span)
    assert len(held) == LEDGERS
    for spans in held.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def check_catalogs(store: S3Store, folder: Path) -> None:
    """The catalog that was synced under fire says, row for row, what one built anew says; and so does the roster."""
    limits = SyncLimits(4, 1.0)
    mine, anew = folder / "home" / "catalog.duckdb", folder / "anew" / "catalog.duckdb"
    sync_catalog(store, mine, limits)
    sync_catalog(store, anew, limits, rebuild=True)
    for table in TABLES:
        found = rows(mine, table)
        assert found == rows(anew, table) and (found or table == "author_events"), table
    roster, _ = read_document(store, roster_key(), Roster)
    with open_catalog(mine) as reader:
        assert {row.author: row.output_digest for row in reader.ready()} == {
            author: entry.output_digest for author, entry in roster.bases["tiny"].authors.items()
        }
    versions = sorted(one.key for one in store.list_objects("roster/history/"))
    assert versions == [f"roster/history/{number:08d}.json" for number in range(1, roster.version + 1)]
    left = sorted(one.name.removeprefix(mine.name) for one in mine.parent.iterdir())
    assert left == ["", ".lock", ".roster", ".sum"]

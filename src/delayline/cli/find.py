"""`delayline find`: where messages are, wherever that is."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from delayline.cli.options import EXIT_FAILED, EXIT_NOT_CHECKED, PLACE_SETTINGS, examples, json_option, settings_options
from delayline.cli.sets import WHERE
from delayline.filters import MessageFilter, literal
from delayline.opening import open_store
from delayline.places import PlaceKind
from delayline.readable import local, relative, size
from delayline.searching import Search, SearchPosition, open_places, queue_of

if TYPE_CHECKING:
    from delayline.cli.screen import Screen
    from delayline.places import MessageMatch
    from delayline.searching import PlaceNote
    from delayline.settings import Settings
    from delayline.sql.journal import MessageEvent

MOST: Final = 2**31 - 1


@click.command(
    epilog=examples(
        "delayline find order-17 --life",
        "delayline find --where 'body=please pay' --limit 5",
        "delayline find --where 'destination=*mail*,type=Reminder' --in pending",
        "delayline find --where correlation=order-17 --in queues --in errors --json",
    )
)
@click.argument("message_id", metavar="[ID]", required=False)
@click.option("--where", multiple=True, metavar="FILTER", help=WHERE)
@click.option(
    "--in",
    "kinds",
    multiple=True,
    type=click.Choice([kind.value for kind in PlaceKind]),
    help="Look there only; repeatable. By default everywhere.",
)
@click.option("--limit", type=click.IntRange(1, MOST), default=50, show_default=True, help="How many to find at most.")
@click.option("--life", is_flag=True, help="With ID: what the journal has recorded of it, event by event, too.")
@click.option("--from", "position", metavar="POSITION", help="Go on with a search from where it says it has ended.")
@settings_options(*PLACE_SETTINGS, "timeouts_url")
@json_option
def find(
    settings: Settings,
    screen: Screen,
    message_id: str | None,
    where: tuple[str, ...],
    kinds: tuple[str, ...],
    limit: int,
    position: str | None,
    *,
    life: bool,
) -> None:
    """Find messages: pending, in queues, failed, or in the journal of what became of them.

    By ID, or by what --where asks for. In a database all endpoints and queues are searched, elsewhere those of
    --endpoint. Nothing is changed, and nobody waits for it. Exit code 0 if any message was found, 1 if there is none,
    3 if none was found and a place could not be searched.
    """
    if (position is None) == (message_id is None and not where):
        raise click.UsageError("Give an ID, --where with a filter, or --from with a position, which has the filter.")
    if life and message_id is None:
        raise click.UsageError("--life is of a message: give its ID.")
    if position is not None and kinds:
        raise click.UsageError("--from has the places of --in already: leave it out.")
    start = None if position is None else SearchPosition.parse(position)
    written = [*where] if message_id is None else [*where, f"id={_written(message_id)}"]
    wanted = MessageFilter.parse(written, datetime.now(UTC)) if start is None else start.filter
    chosen = tuple(map(PlaceKind, kinds)) or tuple(PlaceKind) if start is None else start.kinds
    matches, search = asyncio.run(_searched(settings, screen, wanted, chosen, start, limit))
    events = asyncio.run(_events(settings, matches)) if life else None
    _show(screen, matches, search, events)
    if not matches:
        click.get_current_context().exit(EXIT_NOT_CHECKED if search.unsearched else EXIT_FAILED)


def _written(message_id: str) -> str:
    """Return the id as a value of a filter that only this id fulfils."""
    return str(MessageFilter(message_id=literal(message_id))).removeprefix("id=")


async def _searched(
    settings: Settings,
    screen: Screen,
    wanted: MessageFilter,
    kinds: tuple[PlaceKind, ...],
    start: SearchPosition | None,
    limit: int,
) -> tuple[list[MessageMatch], Search]:
    matches: list[MessageMatch] = []
    async with open_places(settings, kinds, queue=queue_of(wanted)) as places:
        search = Search(places, wanted, kinds=kinds, position=start)
        try:
            with screen.progress() as bars:
                bar = bars.add_task("searching", total=1.0)
                async with contextlib.aclosing(search.pages(limit)) as pages:
                    async for page in pages:
                        matches += page.matches
                        text = f"{page.place}: looked at {page.looked_at:,}, found {len(matches):,}"
                        bars.update(bar, completed=page.share, description=text)
        except asyncio.CancelledError:
            _show(screen, matches, search)
            raise
    return matches, search


async def _events(settings: Settings, matches: list[MessageMatch]) -> list[MessageEvent]:
    """Return what the journal has of the message, earliest first."""
    name = next((known.endpoint for known in matches if known.place.kind is PlaceKind.JOURNAL), None)
    if name is None:
        return []
    from delayline.outgoing import copies_of
    from delayline.sql.journal import events_of
    from delayline.sql.store import SqlDelayedMessageStore

    of_endpoint = settings if name == settings.endpoint else replace(settings, endpoint=name, table_name=None)
    async with open_store(of_endpoint) as store:
        if not isinstance(store, SqlDelayedMessageStore):
            return []
        return await store.read_tables(partial(events_of, ids=(matches[0].id, *copies_of(matches[0].id)))) or []


def _show(
    screen: Screen,
    matches: list[MessageMatch],
    search: Search,
    events: list[MessageEvent] | None = None,
) -> None:
    now = datetime.now(UTC)
    if matches:
        columns = ("id", "where", "state", "destination", "due", "", "size")
        screen.table(columns, [_row(match, now) for match in matches])
    searched = ", ".join(map(str, search.searched))
    if events:
        cells = [(local(at), event, name, queue, local(due), tries) for at, event, queue, due, tries, name in events]
        screen.table(("at", "event", "endpoint", "destination", "due", "retries"), cells)
    screen.echo(f"{len(matches)} found" if matches else f"no message found in {searched or 'any place'}")
    for match in matches[:1] if len(matches) == 1 else ():
        if (command := further(match)) is not None:
            screen.echo(f"see also: {command}", "dim")
    for note in search.left_out:
        screen.echo(f"left out: {note.place}: {note.reason}", "dim")
    for note in search.unsearched:
        screen.warn(f"not searched: {note.place}: {note.reason}")
    if search.position is not None:
        screen.echo(f"go on with: delayline find --from {search.position}")
    screen.document(
        {
            "found": [_as_document(match) for match in matches],
            "searched": [str(place) for place in search.searched],
            "left_out": list(map(_note, search.left_out)),
            "not_searched": list(map(_note, search.unsearched)),
            "position": None if search.position is None else str(search.position),
        }
        | ({} if events is None else {"life": list(map(_event, events))})
    )


def _event(entry: MessageEvent) -> dict[str, object]:
    return entry._asdict() | {"at": entry.at.isoformat(), "due": entry.due.isoformat()}


def further(match: MessageMatch) -> str | None:
    """Return the command that shows more of a message; None where there is none."""
    match match.place.kind:
        case PlaceKind.PENDING:
            command = ["pending", "--destination", match.destination, "--endpoint", match.endpoint or ""]
        case PlaceKind.QUEUES:
            command = ["peek", match.destination]
        case PlaceKind.ERRORS:
            command = ["errors", "show", match.id, "--error-queue", match.place.name]
        case PlaceKind.JOURNAL:
            return None
    return shlex.join(["delayline", *command])


def _row(match: MessageMatch, now: datetime) -> tuple[str, ...]:
    due, at = match.due, match.at
    state = match.state if at is None else f"{match.state} {local(at)}"
    if match.reason:
        state = f"{state}: {' '.join(match.reason.split())[:80]}"
    when = ("", "") if due is None else (local(due), relative(due, now))
    return match.id, str(match.place), state, match.destination, *when, "" if match.size is None else size(match.size)


def _as_document(match: MessageMatch) -> dict[str, object]:
    document = asdict(match) | {"place": str(match.place), "kind": match.place.kind.value}
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in document.items()} | {
        "see": further(match)
    }


def _note(note: PlaceNote) -> dict[str, str]:
    return {"place": str(note.place), "reason": note.reason}

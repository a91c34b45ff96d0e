from __future__ import annotations

import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.conftest import messages_in

from delayline import Headers
from delayline.cli import message_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result

LATER = "2090-01-01T00:00:00+01:00"


def waiting(run: Callable[..., Result]) -> dict[str, Any]:
    return {one["id"]: one for one in run("pending", "--json", "--limit", "1000").document["pending"]}


def test_a_delayed_message_waits(ready: Callable[..., Result]) -> None:
    sent = ready("send", "billing", '{"order": 17}', "--delay", "1h30m", "--id", "order-17", "--json").document
    assert sent["id"] == "order-17"
    due = datetime.fromisoformat(sent["due"])
    assert timedelta(minutes=89) < due - datetime.now(UTC) <= timedelta(minutes=90)
    assert waiting(ready)["order-17"] == {
        "id": "order-17",
        "destination": "billing",
        "due": sent["due"],
        "retries": 0,
        "bytes": 13,
    }


def test_a_time_with_a_zone_is_that_instant(ready: Callable[..., Result]) -> None:
    assert ready("send", "billing", "x", "--at", LATER, "--json").document["due"] == "2089-12-31T23:00:00+00:00"


def test_without_delay_it_goes_to_its_queue_at_once(ready: Callable[..., Result]) -> None:
    assert ready("send", "billing", "-", "--header", "tenant=a=b", input="from stdin").code == 0
    [message] = messages_in("billing")
    assert message.text == "from stdin"
    assert message.headers["tenant"] == "a=b"
    assert Headers.REPLY_TO not in message.headers


def test_sending_an_id_again_changes_nothing(ready: Callable[..., Result]) -> None:
    for delay in ("1h", "2h"):
        assert ready("send", "billing", delay, "--delay", delay, "--id", "one").code == 0
    assert len(waiting(ready)) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["billing", "x", "--at", "2020-01-01T00:00:00Z"], 2, "has passed"),
        (["billing", "x", "--at", "2090-01-01T00:00:00"], 2, "has no time zone"),
        (["billing", "x", "--at", "tomorrow"], 2, "is not understood"),
        (["billing", "x", "--delay", "5"], 2, "write 5s, 10m, 2h, 3d"),
        (["billing", "x", "--delay", "-5s"], 2, "is not understood"),
        (["billing", "x", "--delay", "999999999999d"], 2, "longer than time lasts"),
        (["billing", "x", "--delay", "900000d", "--at", LATER], 2, "exclude each other"),
        (["billing", "x", "--delay", "99999999d"], 2, "beyond year 9999"),
        (["billing", "x", "--header", "tenant"], 2, "NAME=VALUE"),
        (["billing"], 2, "DESTINATION and BODY"),
        ([], 2, "DESTINATION and BODY"),
        (["nowhere", "x"], 1, "queue 'nowhere' does not exist"),
        (["biling", "x"], 1, "Did you mean 'billing'? Start its endpoint once, or run: delayline setup --queue NAME\n"),
        (["nowhere", "x", "--delay", "1h"], 1, ", or pass --no-check-destination where it will exist in time\n"),
        (["biling", "x", "--delay", "14d"], 1, "Did you mean 'billing'?"),
        (["billing", "x", "--id", "a" * 251], 2, "251 characters, 250 at most"),
        (["billing", "x", "--from", "delayline.db"], 2, "leave the other arguments out"),
    ],
)
def test_a_message_that_cannot_be_sent_is_reported_in_one_line(
    ready: Callable[..., Result], arguments: list[str], code: int, error: str
) -> None:
    ran = ready("send", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert error in ran.err
    assert "Traceback" not in ran.err
    if code == 1:
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1


def test_a_csv_file_is_stored_and_its_bad_lines_are_kept_apart(ready: Callable[..., Result]) -> None:
    Path("r.csv").write_text(
        "id,destination,body,delay,deliver_at,headers\n"
        'a,billing,"{""n"": 1}",1h,,\n'
        "b,,x,1h,,\n"
        f'c,billing,"two\nlines",,{LATER},"{{""k"": ""v""}}"\n'
        "d,billing,x,soon,,\n"
        "e,billing,x,,2020-01-01T00:00:00Z,\n"
        "f,billing,x,,2090-01-01T00:00:00,\n"
        "a,billing,x,1h,,\n"
        "g,billing,x,1h,,,too,many\n"
        "h,billing,x,1h,,not json\n"
        "i,billing,x,,,\n"
        "j,billing,x,1h,,\n"
    )
    ran = ready("send", "--from", "r.csv", "--json")
    assert ran.code == 1
    assert ran.document["stored"] == 3
    assert set(waiting(ready)) == {"a", "c", "j"}
    reasons = {one["line"]: one["reason"] for one in ran.document["first_rejected"]}
    assert list(reasons) == [3, 6, 7, 8, 9, 10, 11, 12]
    for line, part in {
        3: "destination is missing",
        6: "is not understood",
        7: "has passed",
        8: "has no time zone",
        9: "stands on line 2 already",
        10: "quote the commas",
        11: "headers are not JSON",
        12: "give one of delay",
    }.items():
        assert part in reasons[line]
    with Path("r.csv.rejected").open(newline="") as file:
        rejected = list(csv.DictReader(file))
    assert [row["id"] for row in rejected] == ["b", "d", "e", "f", "a", "g", "h", "i"]
    assert rejected[1]["reason"].startswith("line 6: ")
    assert rejected[1]["delay"] == "soon"


def test_a_corrected_rejected_file_can_be_sent(ready: Callable[..., Result]) -> None:
    Path("r.csv").write_text("id,destination,body,delay\na,billing,x,soon\n")
    assert ready("send", "--from", "r.csv").code == 1
    rejected = Path("r.csv.rejected")
    rejected.write_text(rejected.read_text().replace("soon,", "2h,"))
    ran = ready("send", "--from", "r.csv.rejected", "--json")
    assert (ran.code, ran.document["stored"]) == (0, 1)


def test_json_lines_are_stored_and_bad_ones_kept_apart(ready: Callable[..., Result]) -> None:
    good = {"id": "a", "destination": "billing", "body": {"n": 1}, "delay": "PT1H", "headers": {"k": "v"}}
    lines = [
        json.dumps(good),
        "",
        "{not json",
        "[1]",
        json.dumps(good | {"id": "b", "headers": {"k": 1}}),
        json.dumps({"destnation": "x", "body": "x", "delay": "1h"}),
        json.dumps({"id": 5, "destination": "billing", "delay_ms": 3_600_000}),
        '{"destination": "billing", "body": "\xff", "delay": "1h"}',
    ]
    Path("r.jsonl").write_text("\n".join(lines), encoding="latin-1")
    ran = ready("send", "--from", "r.jsonl", "--json")
    assert ran.code == 1
    assert set(waiting(ready)) == {"a", "5"}
    reasons = {one["line"]: one["reason"] for one in ran.document["first_rejected"]}
    assert reasons.keys() == {3, 4, 5, 6, 8}
    assert "not JSON" in reasons[3]
    assert "did you mean 'destination'" in reasons[6]
    rejected = [json.loads(line) for line in Path("r.jsonl.rejected").read_text().splitlines()]
    assert len(rejected) == 5
    assert all("reason" in one for one in rejected)


GOOD_LINE = {"destination": "billing", "body": "x", "delay": "1h"}
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"destination":"bil\\ud800ling","body":"x","delay":"1h"}', "control characters"),
        (b'{"destination":"billing","body":"\\ud800","delay":"1h"}', "UTF-8"),
        (b'{"destination":"billing","id":"\\ud800","delay":"1h"}', "control characters"),
        (b'{"destination":"billing","\\ud800":"x","delay":"1h"}', "unknown key"),
        (b'{"destination":"billing","headers":{"a":{"b":"\\ud800"}},"delay":"1h"}', "must be str to str"),
        (b'{"destination":"billing","headers":"' + DEEP.encode() + b'","delay":"1h"}', "headers are not JSON"),
        (b'{"destination":"billing","headers":{"a":' + b"[" * 400 + b"]" * 400 + b'},"delay":"1h"}', "str to str"),
        (b'{"destination":' + b"[" * 400 + b"]" * 400 + b',"delay":"1h"}', "must be a text"),
        (b'{"destination":"billing","delay_ms":' + b"9" * 4000 + b"}", "must be a whole number"),
        (b'{"destination":"billing","delay_ms":-' + b"9" * 12 + b"}", "longer than zero"),
        (b'{"destination":"billing","id":' + b"9" * 4500 + b',"delay":"1h"}', "not JSON"),
        (b'{"destination":"billing","delay":1e400}', "must be a text"),
        (b'{"destination":"billing","body":NaN,"delay":"1h"}', "JSON"),
        (b'{"destination":"billing","delay":"' + b"1h" * 100_000 + b'"}', "200000 characters"),
        (b'{"destination":"billing","deliver_at":"' + b"2" * 100_000 + b'"}', "100000 characters"),
        (DEEP.encode(), "not JSON"),
        (b"[" * 400 + b"]" * 400, "not a JSON object"),
        (b'{"' + b"k" * 100_000 + b'":1}', "unknown key"),
    ],
    ids=range(18),
)
def test_a_hostile_json_line_is_rejected_alone(ready: Callable[..., Result], line: bytes, reason: str) -> None:
    # Given a bad line between two good ones
    lines = [json.dumps(GOOD_LINE | {"id": "a"}).encode(), line, json.dumps(GOOD_LINE | {"id": "b"}).encode()]
    Path("r.jsonl").write_bytes(b"\n".join(lines))
    # When the file is sent
    ran = ready("send", "--from", "r.jsonl", "--json")
    # Then only that one is rejected, with a reason of a bounded length, and can be read again
    assert (ran.code, set(waiting(ready))) == (1, {"a", "b"})
    [rejected] = ran.document["first_rejected"]
    assert rejected["line"] == 2
    assert reason in rejected["reason"]
    assert len(rejected["reason"]) < 600
    kept = json.loads(Path("r.jsonl.rejected").read_text(encoding="utf-8"))
    assert kept["reason"].startswith("line 2: ")
    # And on a screen, too
    assert ready("send", "--from", "r.jsonl").out.endswith("send that file\n")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("billing,\xe9,1h,c,".encode("latin-1"), "not UTF-8"),
        ("billing,\xe9,with a comma,1h,c,".encode("latin-1"), "not UTF-8"),
        (f"billing,x,1h,c,{DEEP}".encode(), "headers are not JSON"),
        (b'billing,x"y",1h,c,"a"b', "not CSV"),
        (f"billing,x,{'1h' * 100_000},c,".encode(), "200000 characters"),
    ],
    ids=range(5),
)
def test_a_hostile_csv_line_is_rejected_alone(ready: Callable[..., Result], line: bytes, reason: str) -> None:
    good = b"destination,body,delay,id,headers\nbilling,x,1h,a,\n%s\nbilling,x,1h,b,\n"
    Path("r.csv").write_bytes(good % line)
    ran = ready("send", "--from", "r.csv", "--json")
    assert (ran.code, set(waiting(ready))) == (1, {"a", "b"})
    [rejected] = ran.document["first_rejected"]
    assert rejected["line"] == 3
    assert reason in rejected["reason"]
    with Path("r.csv.rejected").open(newline="", encoding="utf-8") as file:
        [row] = csv.DictReader(file)
    assert row["reason"].startswith("line 3: ")


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl"])
def test_a_line_that_is_too_long_is_rejected_without_reading_all_of_it(
    ready: Callable[..., Result], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_file, "LONGEST_LINE", 1000)
    lines = ["destination,body,delay,id", "billing,x,1h,a", f"billing,{'x' * 10_000},1h,c", "billing,x,1h,b"]
    if name == "r.jsonl":
        lines = ["", json.dumps(GOOD_LINE | {"id": "a"}), json.dumps(GOOD_LINE | {"body": "x" * 10_000}),
                 json.dumps(GOOD_LINE | {"id": "b"})]  # fmt: skip
    Path(name).write_text("\n".join(lines))
    ran = ready("send", "--from", name, "--json")
    assert (ran.code, set(waiting(ready))) == (1, {"a", "b"})
    assert [one["line"] for one in ran.document["first_rejected"]] == [3]


def test_rejected_lines_follow_no_link(ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a link to another file that appears where rejected lines go after the name was freed
    Path("other").write_text("mine")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    Path("r.csv.rejected").symlink_to("other")
    Path("r.csv").write_text("destination,body,delay\nbilling,x,soon\n")
    # When a line is rejected
    ran = ready("send", "--from", "r.csv")
    # Then that file stays as it is
    assert ran.code == 2
    assert "cannot be written" in ran.err
    assert Path("other").read_text() == "mine"


def test_sending_a_file_again_changes_nothing(ready: Callable[..., Result]) -> None:
    row = json.dumps({"destination": "billing", "body": "x", "delay": "1h"}) + "\n"
    Path("r.jsonl").write_text(row * 3)
    for _ in range(2):
        ran = ready("send", "--from", "r.jsonl", "--json")
        assert (ran.code, ran.document["stored"], ran.document["rejected_file"]) == (0, 3, None)
    assert len(waiting(ready)) == 3
    assert not Path("r.jsonl.rejected").exists()


def test_many_rows_are_stored(ready: Callable[..., Result]) -> None:
    rows = "".join(f"{number},billing,x,1h\n" for number in range(5000))
    Path("r.csv").write_text("id,destination,body,delay\n" + rows)
    assert ready("send", "--from", "r.csv").out.splitlines()[-1] == "5000 stored, 0 rejected"
    assert ready("pending", "--count", "--json").document["total"] == 5000


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("r.csv", "destnation,body\n", "unknown column 'destnation'; did you mean 'destination'?"),
        ("r.csv", "", "has no column destination"),
        ("r.csv", 'destination,"body"x,delay\n', "the first line of r.csv is not CSV"),
        ("r.csv", "destination,body,body\n", "has two columns body"),
        ("r.csv", "destination," + "b" * 100_000 + "\n", "unknown column 'bbb"),
        ("r.txt", "x", "neither .csv nor .jsonl"),
    ],
)
def test_a_file_that_cannot_be_understood_at_all_is_refused(
    ready: Callable[..., Result], name: str, content: str, error: str
) -> None:
    Path(name).write_text(content)
    ran = ready("send", "--from", name)
    assert ran.code == 2
    assert error in ran.err


def test_sending_before_setup_has_a_remedy(run: Callable[..., Result]) -> None:
    ran = run("send", "billing", "x", "--delay", "1h")
    assert (ran.code, ran.out) == (1, "")
    assert "delayline setup" in ran.err
    assert not Path("delayline.db").exists()


def test_memory_is_no_place_for_a_command(run: Callable[..., Result]) -> None:
    ran = run("send", "billing", "x", "--url", "memory:")
    assert ran.code == 2
    assert "gone when the command ends" in ran.err


def test_a_delayed_message_for_a_queue_to_come_is_stored(ready: Callable[..., Result]) -> None:
    ran = ready("send", "nowhere", "x", "--delay", "14d", "--no-check-destination")
    assert (ran.code, "to nowhere: due" in ran.out) == (0, True)

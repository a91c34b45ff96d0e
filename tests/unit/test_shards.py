"""The map of shards: which messages a shard gets, and what a map may say."""

from collections import Counter
from pathlib import Path

import pytest

from delayline import ConfigurationError
from delayline.shards import Shard, ShardMap, ShardState

IDS = [f"order-{number}" for number in range(2000)]


def shards(*names: str, version: int = 1, draining: str = "") -> ShardMap:
    return ShardMap(
        version,
        tuple(
            Shard(name, f"sqlite:///{name}.db", state=ShardState.DRAINING if name in draining else ShardState.ACTIVE)
            for name in names
        ),
    )


def test_messages_are_spread_evenly() -> None:
    counts = Counter(map(shards("a", "b", "c", "d").shard_of, IDS))
    assert min(counts.values()) > 400
    assert len(counts) == 4


def test_a_message_has_the_same_shard_in_every_process_and_release() -> None:
    chosen = [shards("a", "b", "c").shard_of(message_id) for message_id in IDS[:12]]
    assert "".join(chosen) == "abcbcbabbbca"


def test_a_further_shard_takes_its_share_and_moves_no_other_message() -> None:
    before, after = shards("a", "b", "c"), shards("a", "b", "c", "d", version=2)
    moved = [message_id for message_id in IDS if before.shard_of(message_id) != after.shard_of(message_id)]
    assert {after.shard_of(message_id) for message_id in moved} == {"d"}
    assert 400 < len(moved) < 600


def test_a_draining_shard_gets_no_message_and_the_others_keep_theirs() -> None:
    before, after = shards("a", "b", "c"), shards("a", "b", "c", version=2, draining="b")
    kept = [message_id for message_id in IDS if before.shard_of(message_id) != "b"]
    assert all(before.shard_of(message_id) == after.shard_of(message_id) for message_id in kept)
    assert "b" not in set(map(after.shard_of, IDS))


def test_an_id_that_is_no_text_has_a_shard() -> None:
    assert shards("a", "b").shard_of("\ud800") in ("a", "b")


def test_a_map_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "shards.toml"
    file.write_text(
        """
version = 3
[[shard]]
name = "a"
url = "postgresql://shop:secret@db1/shop"
[[shard]]
name = "b"
url = "postgresql://shop@db2/shop"
schema = "s1"
state = "draining"
"""
    )
    read = ShardMap.from_file(file)
    assert read.version == 3
    assert read.active == ("a",)
    assert read.shards[1] == Shard("b", "postgresql://shop@db2/shop", "s1", ShardState.DRAINING)
    assert "secret" not in f"{read} {read.shards[0]}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("version = 1", "[[shard]]"),
        ("version = 1\nshard = [3]", "[[shard]]"),
        ("version = 1\nshards = []", "'shards'"),
        ("version = 0\n[[shard]]\nname='a'\nurl='sqlite:///a.db'", "whole number from 1, not 0"),
        ("version = 1\n[[shard]]\nname='a'", "no url"),
        ("version = 1\n[[shard]]\nname=''\nurl='sqlite:///a.db'", "1 to 60"),
        ("version = 1\n[[shard]]\nname='a'\nurl='sqlite:///a.db'\nstate='off'", "active, draining, removed"),
        ("version = 1\n[[shard]]\nname='a'\nurl='sqlite:///a.db'\nstate='removed'", "needs a shard that is active"),
        ("version = 1\n[[shard]]\nname='a'\nurl='x:'\n[[shard]]\nname='a'\nurl='y:'", "have the name 'a'"),
        ("version = 1\n[[shard]]\nname='a'\nurl='x:'\n[[shard]]\nname='b'\nurl='x:'", "twice"),
        ("version = ", "no TOML"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "shards.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError) as refused:
        ShardMap.from_file(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ShardMap.from_file(tmp_path / "nothing.toml")

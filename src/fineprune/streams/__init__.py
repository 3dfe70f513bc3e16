"""Pruning of streams: data sets of shards that can only be read from beginning to end."""

from fineprune.streams.key_index import KeyIndex
from fineprune.streams.pruned_stream import PrunedStream
from fineprune.streams.shard_assignment import Coverage
from fineprune.streams.stream_loader import StreamLoader

__all__ = ["Coverage", "KeyIndex", "PrunedStream", "StreamLoader"]

"""Rendezvous: where the two ends of a link find each other, and the settings of all links."""

from dataclasses import dataclass

import torch

from fineprune.distributed.parameter_servers.flat_layout import FlatLayout
from fineprune.distributed.parameter_servers.link import Link, WireFormat, join_store


@dataclass(frozen=True)
class Rendezvous:
    """The address of a training's store, and the settings that all links share.

    Attributes:
        host, port: The address of the store.
        timeout_seconds: How long each message may take.
        bfloat16: Whether float32 gradients are sent as bfloat16.
    """

    host: str
    port: int
    timeout_seconds: float = 60.0
    bfloat16: bool = False

    def link(self, layout: FlatLayout, server: int, name: str, side: int, host: str) -> Link:
        """Make one end of a link to a server. The other end must be made at the same time.

        Args:
            name: The name of the group, which has another one whenever it makes its links.
            side: 0 for the worker, 1 for the server.
            host: The address of this process for links.
        """
        part = layout.part(server)
        elements = part.stop - part.start
        return Link(
            join_store(self.host, self.port, timeout_seconds=self.timeout_seconds),
            f"{name}-server{server}",
            side,
            up=WireFormat(elements, layout.dtype, torch.bfloat16 if self.bfloat16 else None),
            down=WireFormat(elements, layout.dtype),
            contents=layout.contents,
            host=host,
            timeout_seconds=self.timeout_seconds,
        )

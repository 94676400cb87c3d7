"""Reading rows of an Engram table on the host, while the layers before it compute.

        rows [B, S, lookups] ── unique, ascending ──> wanted [U] ── the file's bytes ──> values, scale ── in the layer ──> floats

The addresses of all layers follow from the token ids alone. So every table is read from the start of the forward on, by a
thread of its own: the read of the first overlaps the first block, that of the second all layers before it (V4.1 report
section 2.4.2). A call reads each row once and in ascending order.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from .fp_codecs import dequantize_rows
from .host_tensors import read_ahead

# Rows that a thread fetches before the layer asks: 256 MB of a released table. A longer call reads the rest in its layer.
MAX_ROWS_AHEAD = 1 << 20
# Rows whose pages are asked for together.
ROWS_AT_A_TIME = 1 << 14


@dataclass
class EngramStatistics:
    r"""What was read of one packed table since the model was loaded, but for rows that a kernel gathers by itself.

    Args:
        rows (`int`): rows that the layer looked up. unique (`int`): rows read, each once a call.
        nbytes (`int`): of the rows read, scales included. wait (`float`): seconds that the layer waited for them.
    """

    rows: int = 0
    unique: int = 0
    nbytes: int = 0
    wait: float = 0.0


class EngramRead:
    r"""The rows of one table for one call.

    Args:
        table (`tuple[torch.Tensor, torch.Tensor]`): values `[rows, D]` float8_e4m3fn and scale `[rows, ceil(D / block)]`.
        rows (`torch.Tensor` of any shape, int64): the rows to look up.
        block (`int`): channels that share a scale.
        statistics (`EngramStatistics`): counts what is read.
    """

    def __init__(
        self, table: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, block: int, statistics: EngramStatistics
    ):
        self.table, self.block, self.statistics = table, block, statistics
        self.rows = rows.to(table[0].device)
        self._begun: Future | None = None

    def begin(self, threads: ThreadPoolExecutor) -> None:
        """Fetch the first rows in another thread."""
        self._begun = threads.submit(self._fetch_first)

    def take(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        r"""Return the looked-up rows as `[*rows.shape, D]`; what was fetched is not kept (a second call reads again).

        Raises:
            IndexError: for a row beyond the table, and whatever else reading it raised.
        """
        start = perf_counter()
        begun, self._begun = self._begun, None
        wanted, places, pieces = self._fetch_first() if begun is None else begun.result()
        self._fetch(wanted[MAX_ROWS_AHEAD:], [piece[MAX_ROWS_AHEAD:] for piece in pieces])
        counts = self.statistics
        counts.rows, counts.unique = counts.rows + places.numel(), counts.unique + len(wanted)
        counts.nbytes += sum(piece.nbytes for piece in pieces)
        counts.wait += perf_counter() - start
        # The bytes travel to the device, not the floats, and each row once.
        values, scale = (piece.to(device).view(tensor.dtype) for piece, tensor in zip(pieces, self.table, strict=True))
        return dequantize_rows(values, scale, block=self.block, dtype=dtype)[places.to(device)]

    def _fetch_first(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        wanted, places = self.rows.unique(return_inverse=True)
        # Pages of a buffer that were not written to yet take no memory.
        pieces = [rows.new_empty(len(wanted), rows.shape[1]) for rows in self._byte_rows()]
        self._fetch(wanted[:MAX_ROWS_AHEAD], [piece[:MAX_ROWS_AHEAD] for piece in pieces])
        return wanted, places, pieces

    def _fetch(self, wanted: torch.Tensor, pieces: list[torch.Tensor]) -> None:
        for start in range(0, len(wanted), ROWS_AT_A_TIME):
            some = wanted[start : start + ROWS_AT_A_TIME]
            for rows in self._byte_rows():
                read_ahead(rows, some)
            for rows, piece in zip(self._byte_rows(), pieces, strict=True):
                torch.index_select(rows, 0, some, out=piece[start : start + ROWS_AT_A_TIME])

    def _byte_rows(self) -> list[torch.Tensor]:
        return [tensor.view(torch.uint8) for tensor in self.table]


def begin_reads(tables: dict[int, nn.Module], rows: dict[int, torch.Tensor]) -> dict[int, torch.Tensor | EngramRead]:
    r"""Begin to read the tables that lie on the host, each in a thread that ends with its read.

    Args:
        tables (`dict[int, nn.Module]`): the table of every Engram layer.
        rows (`dict[int, torch.Tensor]`): `{layer: [B, S, lookups] int64}`.

    Returns:
        `rows`, with an `EngramRead` for every packed table.
    """
    if torch.compiler.is_compiling():  # a compiled graph has no threads: the layer looks its rows up itself
        return rows
    reads = {layer: tables[layer].read(r) if hasattr(tables[layer], "read") else r for layer, r in rows.items()}
    # A table that a device map put on an accelerator is read there, in the stream of its layer.
    begun = [read for read in reads.values() if isinstance(read, EngramRead) and read.rows.device.type == "cpu"]
    if begun:
        threads = ThreadPoolExecutor(len(begun), thread_name_prefix="engram")
        for read in begun:
            read.begin(threads)
        threads.shutdown(wait=False)
    return reads

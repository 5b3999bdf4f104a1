"""Records that are packed already: to shuffle, reshard or check them again."""

from __future__ import annotations

from pathlib import Path

from ...errors import UserError
from ..dataset import Dataset, open_dataset
from ..tokenizer import CONTEXT_LENGTH
from .base import Row, RowError, Source


class RecordsSource(Source):
    """A packed data set, a folder of bare `.rec`/`.idx` pairs, or one pair; captions are token ids."""

    kind = "RecordIO records"

    def __init__(self, path: Path):
        self.path = path
        self._dataset: Dataset | None = None

    def build_index(self, folder: Path) -> None:
        self._num_rows = len(self._data)
        self.caption_names = list(self._data.caption_names)
        self.fingerprint = self._data.fingerprint

    def __len__(self) -> int:
        return self._num_rows

    def where(self, i: int) -> str:
        return self._data.describe(i)

    def key(self, i: int) -> str:
        shard, position = self._data.locate(i)
        return self._data.files[shard].key_name(position)

    def row(self, i: int) -> Row:
        try:
            record = self._data.read(i)
        except UserError as error:
            raise RowError("record is broken", str(error)) from None
        count = len(self.caption_names)
        if len(record.label) != count * CONTEXT_LENGTH:
            raise RowError("label of another width", f"{len(record.label)} numbers, not {count * CONTEXT_LENGTH}")
        return Row(bytes(record.payload), list(record.label.reshape(count, CONTEXT_LENGTH)))

    @property
    def _data(self) -> Dataset:
        if self._dataset is None:
            self._dataset = open_dataset(self.path)
        return self._dataset

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_dataset": None}

"""Opening of the data that a configuration names: one data set, or several as one."""

from fastdiff.config.data_sets import members_of
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.joined.info import join
from fastdiff.data.joined.reader import JoinedReader, Shards
from fastdiff.data.shards.cache import open_shards_folder
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError


def read_info(data: DataConfig) -> DatasetInfo:
    """Return the description of data on this machine.

    Raises:
        ConfigError: data sets do not agree.
        DataError: a data set is missing or damaged.
        StorageError: it cannot be read.
    """
    if not data.is_joined:
        return DatasetInfo.read(data.path)
    members = members_of(data.entries)
    return join(data.entries, members, [DatasetInfo.read(member.path) for member in members])


def open_shards(data: DataConfig) -> Shards:
    """Open local or cached remote shards, whatever the model.

    Raises:
        ConfigError: no data are named, or data sets do not agree.
        DataError: the data are damaged.
        StorageError: the data cannot be read.
    """
    if not data.entries:
        raise ConfigError("--data.path is missing; give the output folder of `fastdiff encode`")
    if not data.is_joined:
        return _open(data, data.path)
    members = members_of(data.entries)
    readers = [_open(data, member.path) for member in members]
    return JoinedReader(join(data.entries, members, [reader.info for reader in readers]), readers)


def paths_of(data: DataConfig) -> list[str]:
    """Return the folders and addresses of all data sets; DataError: a ``sets.json`` is damaged."""
    return [member.path for member in members_of(data.entries)]


def _open(data: DataConfig, path: str) -> LatentReader:
    folder, fetch = open_shards_folder(path, data.cache)
    # Reads touch one window of shards, or two at a border.
    return LatentReader(folder, open_shards=2 * data.shuffle_shards, fetch=fetch, substitute=data.damaged == "skip")

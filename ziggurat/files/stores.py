"""Files in stores under their URLs: S3 and what speaks its language, Google, Azure, and whatever fsspec reads.

    s3://bucket/folder/*.parquet      S3, MinIO, Ceph …                                     pyarrow's file systems
    gs://bucket/…  abfs://…           Google Cloud Storage, Azure                           pyarrow's file systems
    az://…  hf://…  memory://…        packages of fsspec, where they are installed          fsspec
    file:///data/day_1.csv            this machine

Options of S3 stand behind the URL: `?endpoint_override=http://localhost:9000&region=eu-central-1&anonymous=true`. Where
they are not given, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION and AWS_DEFAULT_REGION are asked. Credentials come
from the environment or the files of the store's own tools. A URL with credentials in it is refused: URLs stand in the
folders of runs and in errors.

A `StoreFile` is its URL and has as much of `Path` as reading asks for; what reading it guarantees, `store_reader.py`
says. Stores are read, never written.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from ziggurat.errors import ConfigError, MissingDependencyError, MissingFileError
from ziggurat.files.store_reader import Opened, StoreAccess, StoreReader, TagsOfStore, Version, asked, version_of
from ziggurat.files.writing import replacing

if TYPE_CHECKING:
    from pyarrow import fs

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_OPTIONS = re.compile(r"\?(?=[A-Za-z_][\w-]*=)")  # a "?" without a name behind it is one of a glob
_SECRET = re.compile(r"secret|token|password|signature|credential|access.?key|account.?key|^sig$", re.I)
_GLOB = re.compile(r"[*?\[]")
_BY_PYARROW = ("gs", "gcs", "abfs", "abfss", "hdfs")
_S3 = ("s3", "s3a", "s3n")
# The last is read by pyarrow itself. It stands here as part of the cache's key: another key opens the store anew.
_ENVIRONMENT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID")
_COPY_BYTES = 8 << 20


def is_url(path: object) -> bool:
    """Return True if a path is the URL of something, as text or as a `StoreFile`."""
    return isinstance(path, StoreFile) or (isinstance(path, str) and bool(_URL.match(path)))


@dataclass(frozen=True, kw_only=True)
class StoreStat:
    """Size (as `os.stat` calls it) and version of a file in a store."""

    st_size: int
    tag: str


@dataclass(frozen=True)
class StoreFile:
    """One file in a store.

    Args:
        url: of the file, with its options.
        copies: a folder of this machine where a whole copy is kept and read instead; "" reads the store.
    """

    url: str
    # No part of equality: the same object is one file, with a copy or without.
    copies: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return PurePosixPath(_split(self.url).rest).name

    @property
    def stem(self) -> str:
        """The name without its last suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The last suffix of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def suffixes(self) -> list[str]:
        """All suffixes of the name."""
        return PurePosixPath(self.name).suffixes

    def absolute(self) -> StoreFile:
        """The same: a URL is relative to nothing."""
        return self

    def resolve(self) -> StoreFile:
        """The same: a store has no links."""
        return self

    def exists(self) -> bool:
        """Return True if there is a file of this name."""
        try:
            self.stat()
        except MissingFileError:
            return False
        return True

    def is_file(self) -> bool:
        """Return True if there is a file of this name."""
        return self.exists()

    def is_dir(self) -> bool:
        """Never: folders are listed by `files_at`."""
        return False

    def stat(self) -> StoreStat:
        """Return what the store says of the file now.

        Raises:
            MissingFileError: no such file.
            DataError: the store refuses, or does not answer.
        """
        version = asked(self._access().look, where=self.url, what="look at the object")
        return StoreStat(st_size=version.num_bytes, tag=version.tag)

    def open(self, mode: str = "rb", *, in_order: bool = False) -> OpenedFile:
        """The file for reading: a `StoreReader`, or the copy on this machine.

        Args:
            mode: "rb".
            in_order: it is read from its first byte to its last.
        """
        assert mode == "rb", "stores are only read"
        if self.copies:
            return self._copy().open("rb")
        return StoreReader(self._access(), in_order=in_order)

    def _copy(self) -> Path:
        """A whole copy of the present version on this machine."""
        # Opened before the copy is looked for: the copy's name holds the version that the store has now.
        with StoreReader(self._access(), in_order=True) as reader:
            what = f"{self.url} {reader.version.num_bytes} {reader.version.tag}"
            digest = hashlib.sha256(what.encode()).hexdigest()[:16]
            path = Path(self.copies).expanduser() / f"{digest}_{self.name}"
            # The size is compared as well: a copy that was cut short later is made anew.
            if path.exists() and path.stat().st_size == reader.version.num_bytes:
                return path
            with replacing(path) as temporary, temporary.open("wb") as file:
                while block := reader.read(_COPY_BYTES):
                    file.write(block)
        return path

    def _access(self) -> StoreAccess:
        opened = _opened(self.url)
        key = opened.inner + self.url_key(opened)
        return StoreAccess(
            where=self.url,
            look=functools.partial(_look, opened.filesystem, key),
            open=functools.partial(_open, opened.filesystem, key),
            tags=opened.tags,
        )

    def url_key(self, opened: _Opened) -> str:
        """Return the key that names the file within its store."""
        return _split(self.url).plain[len(opened.outer) :]


DataPath = Path | StoreFile  # of a file of data
# A file of data, open: one of this machine, or one in a store.
OpenedFile: TypeAlias = BufferedReader | StoreReader


def facts_of(path: DataPath) -> tuple[str, int, int | str]:
    """Return where a file lies, its size, and what changes when it is written: its time, or its version in a store."""
    found = path.stat()
    return str(path.resolve()), found.st_size, found.tag if isinstance(found, StoreStat) else found.st_mtime_ns


def files_at(url: str, *, is_wanted: Callable[[str], bool], copies: str = "") -> list[StoreFile]:
    """The files that a URL stands for: itself, those of a folder, or those that a glob matches; in no order.

    Args:
        url: with `*`, `?`, `[…]` and `**` as in a glob of paths, or without.
        is_wanted: by name, for the files of a folder.
        copies: see `StoreFile`.

    Raises:
        DataError: the store refuses, or does not answer.
    """
    from pyarrow import fs

    opened = _opened(url)
    parts = _split(url)
    key = parts.plain[len(opened.outer) :]
    match = _GLOB.search(key)

    def file(inner_key: str) -> StoreFile:
        return StoreFile(opened.outer + inner_key[len(opened.inner) :] + parts.query, copies)

    def listed(folder: str, *, recursive: bool) -> list[str]:
        selector = fs.FileSelector(folder.rstrip("/"), allow_not_found=True, recursive=recursive)
        found = asked(lambda: opened.filesystem.get_file_info(selector), where=url, what="list the folder")
        return [info.path for info in found if info.type == fs.FileType.File]

    if match is None:
        whole = opened.inner + key
        kind = asked(lambda: opened.filesystem.get_file_info(whole.rstrip("/")), where=url, what="look at it").type
        if kind == fs.FileType.File:
            return [file(whole)]
        return [file(each) for each in listed(whole, recursive=False) if is_wanted(PurePosixPath(each).name)]
    # The deepest folder before the first sign of a glob: all that matches lies below it.
    folder = key[: key.rfind("/", 0, match.start()) + 1]
    pattern = _glob_expression(key)
    # Only a pattern that reaches below this folder needs the whole tree listed.
    names = listed(opened.inner + folder, recursive="/" in key[len(folder) :])
    if opened.inner + key in names:
        return [file(opened.inner + key)]  # its name has such characters
    return [file(each) for each in names if pattern.fullmatch(each[len(opened.inner) :])]


def read_object(url: str, *, max_bytes: int) -> tuple[bytes, int]:
    """The bytes of a small object, at most so many of them, and its size.

    Raises:
        MissingFileError, DataError: as `StoreReader`.
    """
    with StoreReader(StoreFile(url)._access(), in_order=True) as reader:
        return reader.read(max_bytes), reader.version.num_bytes


def local_path(url: str) -> str:
    """The path that a `file://` URL names; other texts as they are."""
    parts = urlsplit(url)
    # `file:data.csv` may be the name of a file: only two slashes make it a URL.
    return unquote(parts.path) if parts.scheme.lower() == "file" and url[4:7] == "://" else url


# ------------------------------------------------------------------------------------------------------ file systems


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A URL in parts: its scheme, bucket and key, `?name=value…`, and the URL without these options."""

    scheme: str
    rest: str
    query: str

    @property
    def plain(self) -> str:
        return f"{self.scheme}://{self.rest}"

    @property
    def options(self) -> dict[str, str]:
        return dict(parse_qsl(self.query[1:]))


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A file system; the file `outer + key` of URLs is called `inner + key` there."""

    filesystem: fs.FileSystem
    outer: str
    inner: str
    tags: TagsOfStore = field(default_factory=TagsOfStore)


def _split(url: str) -> _Split:
    scheme, rest = url.split("://", 1)
    # In the address of a web page, what follows "?" is part of its name.
    options = None if scheme.lower() in ("http", "https") else _OPTIONS.search(rest)
    cut = options.start() if options else len(rest)
    return _Split(scheme=scheme.lower(), rest=rest[:cut], query=rest[cut:])


def _opened(url: str) -> _Opened:
    parts = _split(url)
    authority = parts.rest.split("/", 1)[0]
    names = [name for name, _ in parse_qsl(urlsplit(url).query)]
    if ":" in authority.rpartition("@")[0] or any(_SECRET.search(name) for name in names):
        raise ConfigError(
            expected="a URL without credentials: it is kept in the folders of runs",
            found="a user and a password, or a key, in it",
            where=f"{parts.scheme}://…{authority.rpartition('@')[2]}",
            ways_out=(
                "set the store's own variables: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
                "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY",
                "make a new key: this one stands in the history of your shell",
            ),
        )
    # Read at each call: the functions below are remembered by their arguments.
    environment = tuple(os.environ.get(name, "") for name in _ENVIRONMENT)
    # The environment is part of the key: a program may set other credentials between two reads.
    return _made(parts.scheme, authority, parts.query, environment)


@functools.lru_cache(maxsize=64)
def _made(scheme: str, authority: str, query: str, environment: tuple[str, ...]) -> _Opened:
    """The file system of a bucket; the environment decides, too."""
    outer = f"{scheme}://{authority}/"
    if scheme in _S3:
        options = _Split(scheme=scheme, rest=authority, query=query).options
        found: dict[str, str] = dict(zip(_ENVIRONMENT, environment, strict=True))
        return _Opened(filesystem=_s3(authority, options, found), outer=outer, inner=f"{authority}/")
    if scheme in _BY_PYARROW:
        from pyarrow import fs

        named = "gs" + outer[3:] if scheme == "gcs" else outer
        filesystem, inner = asked(lambda: fs.FileSystem.from_uri(named + query), where=outer, what="open the store")
        return _Opened(filesystem=filesystem, outer=outer, inner=f"{inner.rstrip('/')}/")
    return _by_fsspec(scheme, authority, query)


def _s3(bucket: str, options: Mapping[str, str], environment: Mapping[str, str]) -> fs.FileSystem:
    from pyarrow import fs

    endpoint = options.get("endpoint_override") or environment["AWS_ENDPOINT_URL_S3"] or environment["AWS_ENDPOINT_URL"]
    region = options.get("region") or environment["AWS_REGION"] or environment["AWS_DEFAULT_REGION"]
    scheme = options.get("scheme") or (endpoint.split("://", 1)[0] if "://" in endpoint else "https")
    # This asks AWS over the network; a server of one's own has no such answer.
    if not endpoint and not region:
        region = asked(lambda: fs.resolve_s3_region(bucket), where=f"s3://{bucket}", what="find the bucket's region")
    return fs.S3FileSystem(
        # S3's own address is what no override means.
        endpoint_override=endpoint.split("://", 1)[-1] or None,
        region=region or None,
        scheme=scheme,
        anonymous=options.get("anonymous", "").lower() == "true",
        connect_timeout=10,
        request_timeout=60,
    )


def _by_fsspec(scheme: str, authority: str, query: str) -> _Opened:
    try:
        import fsspec
        from pyarrow import fs

        filesystem = fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        raise MissingDependencyError(
            expected=f"a package that reads {scheme}://",
            found=str(error)[:300],
            where=f"{scheme}://{authority}",
            ways_out=(
                "pip install the package of fsspec that reads it (adlfs for az://, huggingface_hub for hf://)",
                f"built in: {', '.join(f'{name}://' for name in (*_S3[:1], *_BY_PYARROW, 'file'))}",
                "copy the files to this machine",
            ),
        ) from error
    # Packages of fsspec differ in whether the bucket is part of a file's key: a key that is made up shows it.
    plain = f"{scheme}://{authority}/key"
    stripped = filesystem._strip_protocol(plain)
    rest = f"{authority}/key" if stripped.endswith(f"{authority}/key") else "key"
    return _Opened(
        filesystem=fs.PyFileSystem(fs.FSSpecHandler(filesystem)),
        outer=f"{scheme}://{authority}/",
        inner=stripped[: -len(rest)] + (f"{authority}/" if rest != "key" else ""),
    )


def _look(filesystem: fs.FileSystem, key: str) -> Version:
    """Return the version that a file system reports of a file now."""
    from pyarrow import fs

    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, fs.FSSpecHandler):
        # fsspec keeps listings: an object that was replaced since would look unchanged.
        handler.fs.invalidate_cache()
        info = handler.fs.info(key)
        etag = str(info.get("ETag") or info.get("etag") or "")
        return version_of(int(info["size"]), tag=handler.fs.ukey(key), etag=etag)
    file, version = _open(filesystem, key)
    file.close()
    return version


def _open(filesystem: fs.FileSystem, key: str) -> tuple[Opened, Version]:
    """A file, open, and its version; of S3 by one request."""
    from pyarrow import fs

    if isinstance(getattr(filesystem, "handler", None), fs.FSSpecHandler):
        version = _look(filesystem, key)
        return filesystem.open_input_file(key), version
    file = filesystem.open_input_file(key)
    facts = {_text(name).lower(): _text(value) for name, value in (file.metadata() or {}).items()}
    tag = "; ".join(facts[name] for name in ("etag", "generation", "versionid", "last-modified") if name in facts)
    if not tag:
        # Stores that give no tag still say when an object was written.
        tag = str(filesystem.get_file_info(key).mtime_ns or "")
    return file, version_of(file.size(), tag=tag, etag=facts.get("etag", ""))


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _glob_expression(pattern: str) -> re.Pattern[str]:
    """A glob over whole keys: `*`, `?` and `[…]` stay within a folder, `**` as a folder of its own is any number."""
    expression = ""
    for part in re.split(r"(\*\*/|\*|\?|\[!?[^\]/]+\])", pattern):
        if part == "**/":
            expression += "(?:[^/]+/)*"
        elif part in ("*", "?"):
            expression += "[^/]*" if part == "*" else "[^/]"
        elif part.startswith("[") and part.endswith("]"):
            # Globs negate by "!", and expressions by "^".
            expression += "[^" + part[2:] if part.startswith("[!") else part
        else:
            # Everything else stands for itself.
            expression += re.escape(part)
    return re.compile(expression)

"""The registry packages that the pictograms come from: versions, licences, and how their files are fetched."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Package:
    """One package of the npm registry.

    Attributes:
        name, version: what `npm pack name@version` takes.
        licence: of its pictures or data, as its own files state it.
        artist: the key of its drawings in this data set; None for a package of names only.
        wanted: prefixes of the files that are read.
    """

    name: str
    version: str
    licence: str
    artist: str | None
    wanted: tuple[str, ...] = ("icons.json", "chars.json")


NAMES = Package(
    "emojibase-data",
    "17.0.0",
    "MIT; data from Unicode CLDR, Unicode-3.0",
    None,
    ("en/data.json", "meta/unicode-names.json", "en/shortcodes/iamcal.json"),
)
HELD_OUT_ARTIST = Package("openmoji", "17.0.0", "CC-BY-SA-4.0", "openmoji", ("data/openmoji.json", "color/svg/"))
# The order decides which of two nearly equal drawings stays.
TRAINING_ARTISTS = (
    Package("@iconify-json/noto", "1.2.9", "Apache-2.0", "noto"),
    Package("@iconify-json/twemoji", "1.2.5", "CC-BY-4.0", "twemoji"),
    Package("@iconify-json/fluent-emoji-flat", "1.2.6", "MIT", "fluent"),
    Package("@iconify-json/emojione", "1.2.3", "CC-BY-4.0", "emojione"),
    Package("@iconify-json/fxemoji", "1.2.2", "Apache-2.0", "fxemoji"),
    Package("@iconify-json/noto-v1", "1.2.5", "Apache-2.0", "noto1"),
)
PACKAGES = (NAMES, *TRAINING_ARTISTS, HELD_OUT_ARTIST)


def fetch(package: Package) -> dict[str, bytes]:
    """Download one package and return the wanted files, path inside the package -> contents.

    Raises:
        UserError: npm is missing, the registry cannot be reached, or the package lacks a wanted file.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(
            "the pictograms come from the npm registry, and there is no `npm` on PATH: install Node.js (which brings "
            "npm), or build the rendered set with `rwkv-clip prepare shapes OUT`"
        )
    with tempfile.TemporaryDirectory(prefix="rwkv-clip-npm-") as folder:
        specification = f"{package.name}@{package.version}"
        command = [npm, "pack", "--silent", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=60000"]
        try:
            done = subprocess.run(
                [*command, "--pack-destination", folder, specification],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise UserError(_cannot_fetch(specification, f"no answer in {TIMEOUT_SECONDS} s")) from None
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            reason = (done.stderr or done.stdout).strip().splitlines()
            raise UserError(_cannot_fetch(specification, reason[-1] if reason else f"exit code {done.returncode}"))
        return _read(archives[0], package)


def _cannot_fetch(specification: str, reason: str) -> str:
    return (
        f"`npm pack {specification}` failed ({reason}): check the network and the registry (`npm config get registry`)"
        ", or build the rendered set, which needs neither, with `rwkv-clip prepare shapes OUT`"
    )


def _read(archive: Path, package: Package) -> dict[str, bytes]:
    files = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition("/")[2]  # every path starts with "package/"
            if member.isfile() and name.startswith(package.wanted):
                files[name] = tar.extractfile(member).read()
    missing = [prefix for prefix in package.wanted if not any(name.startswith(prefix) for name in files)]
    if missing:
        raise UserError(
            f"npm package {package.name} {package.version} holds no {', '.join(missing)}: is the registry whole?"
        )
    return files

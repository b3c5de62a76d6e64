"""Which two files to compare."""

from __future__ import annotations

from pathlib import Path

from ikbo_cli.errors import ManifestError
from ikbo_cli.program import read_manifest, sha256_of


def find_pair(original: Path | None, optimized: Path | None) -> tuple[Path, Path]:
    """The original and the optimized file.

    With one path, the optimized file, the original is found through its manifest; with none, the optimized file is
    the newest in this folder that carries a manifest.

    Raises:
        ManifestError: no manifest, or the original is missing or has changed since.
    """
    if original is not None and optimized is not None:
        return original, optimized
    chosen = optimized or original
    if chosen is None:
        files = sorted(Path().glob("*.pt2"), key=lambda p: p.stat().st_mtime, reverse=True)
        chosen = next((p for p in files if read_manifest(p) is not None), None)
        if chosen is None:
            raise ManifestError("no file in this folder carries a manifest", hint="name the two files")
    manifest = read_manifest(chosen)
    if manifest is None:
        raise ManifestError(
            f"{chosen} carries no manifest" if chosen.exists() else f"{chosen}: no such file",
            hint="name both files: ikbo verify ORIGINAL OPTIMIZED",
        )
    found = chosen.parent / manifest["original"]["path"]
    wanted = manifest["original"]["sha256"]
    if not found.exists():
        raise ManifestError(f"the original of {chosen} is not at {found} (sha256 {wanted})", hint="name both files")
    actual = sha256_of(found)
    if actual != wanted:
        raise ManifestError(f"{found} is not the file that {chosen} was made from: sha256 {actual}, expected {wanted}")
    return found, chosen

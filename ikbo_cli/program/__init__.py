"""A saved model in and out: safe loading, saving, manifest, names."""

from ikbo_cli.program.archive import detect_format, read_manifest, sha256_of
from ikbo_cli.program.load import Program, ProgramInput, load, unlifted
from ikbo_cli.program.save import save
from ikbo_cli.program.source import module_path, source_location

__all__ = [
    "Program",
    "ProgramInput",
    "detect_format",
    "load",
    "module_path",
    "read_manifest",
    "save",
    "sha256_of",
    "source_location",
    "unlifted",
]

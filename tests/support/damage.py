"""Files as a bad disk leaves them, and as someone may make them."""

import hashlib
import io

import torch

from pyro_scale.storage import files


def saved(contents):
    """As torch writes it."""
    file = io.BytesIO()
    torch.save(contents, file)
    return file.getvalue()


def crafted(path, body):
    """A file of ours around some bytes, with the right length and checksum."""
    digest = hashlib.sha256(body).hexdigest()
    header = f"Pyro Scale results, format {files._FORMAT}, {len(body)} bytes, SHA-256 {digest}\n"
    path.write_bytes(header.encode() + body)
    return path


def damage(path, source, kinds=("flip", "cut", "append", "zero")):
    """Changes a file at random in one of these ways, which it returns in words."""
    held = bytearray(path.read_bytes())
    place, kind = source.randrange(len(held)), source.choice(kinds)
    if kind == "flip":
        held[place] ^= 1 << source.randrange(8)
    elif kind == "cut":
        del held[place:]
    elif kind == "empty":
        held.clear()
    elif kind == "append":
        held += bytes([place % 256])
    elif kind == "zero":
        held[place : place + 16] = bytes(len(held[place : place + 16]))
        if held == path.read_bytes():
            held[place] ^= 1
    path.write_bytes(held)
    if kind == "gone":
        path.unlink()
    return f"{path}: {kind} at {place}"

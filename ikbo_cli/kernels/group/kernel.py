"""Stable grouping of candidates by user: ranks by comparison, no atomics, no host read.

A candidate's place is the number of candidates that sort before it by (user, position). Up to a few
thousand candidates one launch counts that directly; above, a first launch sorts chunks and a second one
finds each place by binary search in the other chunks.
"""

import triton
import triton.language as tl


@triton.jit
def _user_keys(index_ptr, rows, stride, B, U):
    """Users of rows as int32; `U` where out of range (they sort last), `U + 1` beyond the batch."""
    user = tl.load(index_ptr + rows.to(tl.int64) * stride, mask=rows < B, other=0)
    key = tl.where((user < 0) | (user >= U), U, user).to(tl.int32)
    return tl.where(rows < B, key, U + 1)


# sizes that change from request to request must not compile a kernel anew: `do_not_specialize`
@triton.jit(do_not_specialize=["B", "U"])
def group_rank_kernel(
    index_ptr,
    order_ptr,
    offsets_ptr,
    stride,
    B,
    U,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Order (first `cdiv(B, BLOCK)` programs) and offsets (`cdiv(U + 1, BLOCK)` more) in one launch."""
    pid = tl.program_id(0)
    row_programs = tl.cdiv(B, BLOCK)
    is_row = pid < row_programs
    # candidates sort by `user * B + row`, a 32-bit number here (the launch sees to it); user `u` begins at `u * B`
    slots = tl.where(is_row, pid, pid - row_programs) * BLOCK + tl.arange(0, BLOCK)
    place = tl.where(is_row, _user_keys(index_ptr, slots, stride, B, U) * B + slots, slots * B)
    before = tl.zeros([BLOCK, CHUNK], tl.int32)  # summed over the chunk once, at the end
    column = tl.arange(0, CHUNK)
    following = _user_keys(index_ptr, column, stride, B, U)
    for start in range(0, B, CHUNK):
        others = following * B + start + column
        following = _user_keys(index_ptr, start + CHUNK + column, stride, B, U)  # in flight meanwhile
        before += (others[None, :] < place[:, None]).to(tl.int32)
    rank = tl.sum(before, 1)
    if is_row:
        tl.store(order_ptr + rank, slots, mask=slots < B)
    else:
        tl.store(offsets_ptr + slots, rank, mask=slots <= U)


@triton.jit(do_not_specialize=["B", "U"])
def group_chunk_sort_kernel(
    index_ptr,
    keys_ptr,
    rows_ptr,
    stride,
    B,
    U,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sort each chunk of `CHUNK` candidates by user, stable; places beyond the batch hold `U + 1`."""
    pid = tl.program_id(0)
    rows = pid * BLOCK + tl.arange(0, BLOCK)
    own = (pid * BLOCK) // CHUNK * CHUNK
    columns = own + tl.arange(0, CHUNK)
    keys = _user_keys(index_ptr, rows, stride, B, U)
    others = _user_keys(index_ptr, columns, stride, B, U)
    tied_before = (others[None, :] == keys[:, None]) & (columns[None, :] < rows[:, None])
    rank = tl.sum(((others[None, :] < keys[:, None]) | tied_before).to(tl.int32), 1)
    tl.store(keys_ptr + own + rank, keys)
    tl.store(rows_ptr + own + rank, rows)


@triton.jit
def _lower_bounds(keys_ptr, base, wanted, CHUNK: tl.constexpr, STEPS: tl.constexpr):
    """How many of the `CHUNK` sorted keys at `base` are below `wanted`; CHUNK is 2 ** STEPS."""
    low = tl.zeros_like(wanted)
    for step in tl.static_range(STEPS):
        middle = tl.load(keys_ptr + base + low + ((CHUNK >> (step + 1)) - 1))
        low = tl.where(middle < wanted, low + (CHUNK >> (step + 1)), low)
    return tl.where(tl.load(keys_ptr + base + low) < wanted, low + 1, low)


@triton.jit(do_not_specialize=["B", "U", "chunks"])
def group_merge_kernel(
    keys_ptr,
    rows_ptr,
    order_ptr,
    offsets_ptr,
    B,
    U,
    chunks,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Places of the chunk-sorted candidates over all chunks, and the offsets, `WIDTH` chunks at a time."""
    pid = tl.program_id(0)
    row_programs = chunks * (CHUNK // BLOCK)
    if pid < row_programs:
        slots = pid * BLOCK + tl.arange(0, BLOCK)
        own = (pid * BLOCK) // CHUNK
        keys = tl.load(keys_ptr + slots)
        rows = tl.load(rows_ptr + slots)
        rank = slots - own * CHUNK
    else:
        slots = (pid - row_programs) * BLOCK + tl.arange(0, BLOCK)
        own = chunks
        keys = slots
        rows = slots
        rank = tl.zeros([BLOCK], tl.int32)
    is_row = pid < row_programs
    for first in range(0, chunks, WIDTH):
        chunk = first + tl.arange(0, WIDTH)
        counted = (chunk < chunks) & (chunk != own)
        # equal keys of earlier chunks come first: count `<=` there, which is `< key + 1`
        earlier = (is_row & (chunk < own)).to(tl.int32)
        wanted = keys[:, None] + earlier[None, :]
        base = tl.where(counted, chunk, 0)[None, :] * CHUNK
        found = _lower_bounds(keys_ptr, base, wanted, CHUNK, STEPS)
        rank += tl.sum(tl.where(counted[None, :], found, 0), 1)
    if is_row:
        tl.store(order_ptr + rank, rows, mask=rows < B)
    else:
        tl.store(offsets_ptr + slots, rank, mask=slots <= U)

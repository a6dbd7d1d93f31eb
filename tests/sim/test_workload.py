from itertools import islice, pairwise

import pytest

from kvbus.tools.sim.workload import TRACE_BLOCK, TraceError, expand, read_trace, synthetic


def test_the_same_seed_gives_the_same_workload():
    assert list(islice(synthetic(3), 50)) == list(islice(synthetic(3), 50))
    assert list(islice(synthetic(3), 50)) != list(islice(synthetic(4), 50))


def test_ranks_share_only_system_prompts():
    starts = [{job.tokens[:64] for job in islice(synthetic(3, rank), 200)} for rank in (0, 1)]
    assert starts[0] & starts[1]
    jobs = [set(islice(synthetic(3, rank), 200)) for rank in (0, 1)]
    assert not jobs[0] & jobs[1]


def test_a_turn_continues_the_tokens_of_its_conversation():
    jobs = list(islice(synthetic(1, conversations=1, turns=5), 40))
    followed = [b for a, b in pairwise(jobs) if b.tokens[: len(a.tokens)] == a.tokens]
    assert followed
    assert all(0 < job.prompt < len(job.tokens) for job in jobs)


def test_conversations_end_at_the_token_limit():
    jobs = islice(synthetic(1, turns=1000, conversations=2, max_tokens=1000), 300)
    assert max(len(job.tokens) for job in jobs) < 1000 + 192 + 192


def test_a_workload_has_jobs_of_each_tenant():
    assert {job.tenant for job in islice(synthetic(1, tenants=2), 300)} == {"", "adapter-1", "adapter-2"}


def test_a_trace_id_always_stands_for_the_same_512_tokens(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}\n'
        '{"timestamp": 9, "input_length": 1024, "output_length": 1, "hash_ids": [0, 6]}\n'
    )
    first, second = read_trace(trace)
    assert (first.prompt, len(first.tokens)) == (600, 607)
    assert first.tokens[:TRACE_BLOCK] == second.tokens[:TRACE_BLOCK] == expand(0)
    assert first.tokens[TRACE_BLOCK:600] == expand(5)[:88]
    assert second.tokens[TRACE_BLOCK:1024] == expand(6)
    assert list(read_trace(trace, rank=1, ranks=2)) == [second]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace.jsonl:2: not a trace request"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}', "trace.jsonl:2: not a trace request"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "trace.jsonl:2: input_length 513 is not from 1 to 512",
        ),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, line, message):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 7, "hash_ids": [0]}\n' + line + "\n")
    with pytest.raises(TraceError, match=message):
        list(read_trace(trace))


def test_a_missing_trace_file_is_named(tmp_path):
    with pytest.raises(TraceError, match="nowhere: No such file"):
        list(read_trace(tmp_path / "nowhere"))

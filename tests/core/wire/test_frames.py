import pytest

from kvbus.core.types import Reason
from kvbus.core.wire.frames import (
    END_SEQ,
    FrameLimits,
    LiveMessage,
    ReplayEnd,
    ReplayMessage,
    ReplayRequest,
    parse_live,
    parse_replay,
    parse_replay_request,
    replay_data,
    replay_end,
    replay_request,
)

LIMITS = FrameLimits(max_frame_bytes=1000)
SEVEN = (7).to_bytes(8, "big")
PUBLISHER = bytes(range(16))


class TestLive:
    def test_a_live_message_has_topic_seq_and_payload(self):
        assert parse_live([b"kv", SEVEN, b"x"], LIMITS) == LiveMessage(b"kv", 7, b"x")

    def test_the_seq_frame_of_a_live_message_may_have_a_publisher_id(self):
        assert parse_live([b"", SEVEN + PUBLISHER, b"x"], LIMITS) == LiveMessage(b"", 7, b"x", PUBLISHER)

    @pytest.mark.parametrize("count", [n for n in range(51) if n != 3])
    def test_a_live_message_with_another_number_of_frames_is_rejected(self, count):
        assert parse_live([SEVEN] * count, LIMITS) is Reason.FRAME_COUNT

    @pytest.mark.parametrize("payload", [b"\x93x", b"\x81x", b"\xdc\0\1", b"\xdf"])
    def test_additional_frames_after_the_payload_are_ignored(self, payload):
        """kvbus ignores frames that a later version of an engine may add after the payload, which is the third frame.

        If the third frame of a longer message cannot be a batch, kvbus refuses the message: an additional frame may
        come before the seq, so that the third frame is the seq.
        """
        assert parse_live([b"kv", SEVEN, payload, b"later"], LIMITS) == LiveMessage(b"kv", 7, payload)
        assert parse_live([b"kv", SEVEN, payload] + [b""] * LIMITS.max_frames, LIMITS) is Reason.FRAME_COUNT
        assert parse_live([b"", b"kv-topic", SEVEN, payload], LIMITS) is Reason.FRAME_COUNT

    @pytest.mark.parametrize("width", [0, 1, 7, 9, 16, 23, 25])
    def test_a_live_seq_of_the_wrong_width_is_rejected(self, width):
        assert parse_live([b"", bytes(width), b""], LIMITS) is Reason.SEQ_WIDTH

    @pytest.mark.parametrize("tail", [b"", PUBLISHER])
    @pytest.mark.parametrize(("seq", "good"), [(0, True), (2**63 - 1, True), (2**63, False), (2**64 - 1, False)])
    def test_a_seq_must_be_below_two_to_the_63(self, seq, good, tail):
        parsed = parse_live([b"", seq.to_bytes(8, "big") + tail, b"x"], LIMITS)
        assert parsed == (LiveMessage(b"", seq, b"x", tail or None) if good else Reason.SEQ_RANGE)

    @pytest.mark.parametrize("frames", [[b"", SEVEN, bytes(1001)], [bytes(1001), SEVEN, b""]])
    def test_an_oversized_live_frame_is_rejected(self, frames):
        assert parse_live(frames, LIMITS) is Reason.FRAME_SIZE
        assert isinstance(parse_live([frame[:1000] for frame in frames], LIMITS), LiveMessage)


class TestReplay:
    @pytest.mark.parametrize("head", [[], [b""], [b"", b""], [b"", b"kv@pod@model"], [b"kv"]])
    def test_a_replay_message_of_every_framing_is_parsed(self, head):
        for tail in (b"", PUBLISHER):
            message = parse_replay([*head, SEVEN + tail, b"x"], LIMITS)
            assert isinstance(message, ReplayMessage)
            assert (message.seq, message.payload) == (7, b"x")

    @pytest.mark.parametrize(
        "frames",
        [
            [b"", END_SEQ, b""],
            [b"", b"", END_SEQ, b""],
            [b"", b"kv", END_SEQ, b""],
            [END_SEQ, b""],
            [END_SEQ],
            [b"", END_SEQ],
            [b"", END_SEQ + PUBLISHER, b""],
        ],
    )
    def test_end_is_recognized_in_every_framing(self, frames):
        assert parse_replay(frames, LIMITS) == ReplayEnd()

    @pytest.mark.parametrize("count", [0, 1, 5, 17, 50])
    def test_a_replay_message_with_a_wrong_number_of_frames_is_rejected(self, count):
        assert parse_replay([SEVEN] * count, LIMITS) is Reason.FRAME_COUNT

    @pytest.mark.parametrize("width", [0, 1, 7, 9, 16, 25])
    def test_a_replay_seq_of_the_wrong_width_is_rejected(self, width):
        assert parse_replay([b"", bytes(width), b"x"], LIMITS) is Reason.SEQ_WIDTH

    def test_a_replay_seq_out_of_range_is_rejected(self):
        assert parse_replay([b"", (2**63).to_bytes(8, "big"), b"x"], LIMITS) is Reason.SEQ_RANGE

    def test_an_oversized_replay_payload_is_rejected(self):
        assert parse_replay([b"", SEVEN, bytes(1001)], LIMITS) is Reason.FRAME_SIZE


class TestRequest:
    def test_a_replay_request_of_a_dealer_is_parsed(self):
        assert parse_replay_request([b"id", *replay_request(7)]) == ReplayRequest([b"id", b""], 7)

    @pytest.mark.parametrize(
        "frames",
        [
            [b"id", b"", b""],
            [b"id", b"", b"\0" * 7],
            [b"id", b"", b"\0" * 24],
            [b"id", b"", b"snapshot!"],
            [b"id", b"", b"", SEVEN],
            [b"id", b""],
            [b"id", *[SEVEN] * 49],
        ],
    )
    def test_a_replay_request_with_a_malformed_start_gets_no_batches(self, frames):
        request = parse_replay_request(frames)
        assert request is not None
        assert request.start == 2**64 - 1
        assert request.envelope[0] == b"id"

    @pytest.mark.parametrize("frames", [[], [b"id"]])
    def test_a_replay_request_without_a_requester_is_ignored(self, frames):
        assert parse_replay_request(frames) is None


class TestAnswer:
    @pytest.mark.parametrize("tail", [b"", PUBLISHER])
    @pytest.mark.parametrize("framing", ["3", "4"])
    def test_parse_replay_reads_kvbus_own_replay_answers(self, framing, tail):
        sent = replay_data(framing, [b"id", b""], b"kv", (2**40).to_bytes(8, "big") + tail, b"x")
        message = parse_replay(sent[1:], LIMITS)
        assert isinstance(message, ReplayMessage)
        assert (message.seq, message.payload) == (2**40, b"x")
        assert parse_replay(replay_end(framing, [b"id", b""])[1:], LIMITS) == ReplayEnd()

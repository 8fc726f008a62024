"""A rank process without a model or torch: it speaks the frames of worker.rank.rank and answers each step at once.

The name of its model is its script:
    plain     loads, joins, answers steps: for each sampling row the token that says how many steps of the epoch came
    refuse    says that the model cannot be served
    dies      ends while loading
    stuck     answers no second join: what a rank does whose old group holds it
    slow      takes 2 s to leave its old group for another
    mute      takes steps and never answers
    broken    answers step 1, then says that its epoch broke
    long      answers a step after 5 s in which its mark moves all the time
    raises    answers step 1, then says that it raised in it
    garbles   answers a step by bytes that are no message
    hangs     takes a step, says that it computes, and its mark stands still
    loads     takes 8 s to load, in which its mark moves all the time
    freezes   its mark stands still while it loads
"""

import os
import socket
import sys
import threading
import time

import orjson

from orca.core.transport import engine_pb2 as pb
from orca.core.transport.frame_socket import FrameSocket
from orca.core.transport.frame_stream import encode
from orca.worker.messages import frames
from orca.worker.messages.frames import LoadReport, RankFrameKind, RankHeartbeat
from orca.worker.messages.inbox import Inbox
from orca.worker.messages.master_link import MasterLink
from orca.worker.parallel.progress import RankProgress

_BEAT_S = 0.05


def main() -> None:
    """Run a rank that acts by its script instead of a model."""
    link = FrameSocket(socket.socket(fileno=int(sys.argv[1])), RankFrameKind, takes_sockets=True)
    progress = RankProgress()
    threading.Thread(target=_beat, args=(link, progress), daemon=True).start()
    kind, payload = link.read() or (None, b"")
    assert kind is RankFrameKind.START
    start = orjson.loads(payload)
    settings = start["settings"]
    script = settings["model"]
    if script == "refuse":
        link.write(encode(RankFrameKind.REFUSED, b"config.json says so"))
        return
    if script == "dies":
        os._exit(7)
    while script == "freezes":
        time.sleep(1)
    if script == "loads":
        _work(progress, 8.0)
    loaded = LoadReport(revision=settings["dtype"], max_model_len=64, weight_bytes=10, slots_possible=40)
    progress.at("idle", is_waiting=True)
    link.write(frames.encode_record(RankFrameKind.LOADED, loaded))
    answers = settings["stage"] == settings["stages"] - 1 and start["rank"] == 0
    joins = 0
    epoch = taken = 0
    inbox, master = Inbox(), None
    threading.Thread(target=_read, args=(link, inbox), daemon=True).start()
    while (frame := inbox.next())[0] is not RankFrameKind.STOP:
        kind, payload = frame
        if kind is RankFrameKind.LINK:
            master = MasterLink(link.take_socket(), *frames.decode_link(payload), inbox)
            master.start()
        elif kind is RankFrameKind.JOIN:
            joins += 1
            if script == "stuck" and joins > 1:
                continue
            if script == "slow" and joins == 2:
                time.sleep(2.0)
            epoch, taken = orjson.loads(payload)["epoch"], 0
            if master is not None:
                master.end(f"epoch {epoch} begins")
                master = None
            link.write(frames.encode_json(RankFrameKind.LEFT, epoch=epoch))
            link.write(frames.encode_json(RankFrameKind.JOINED, epoch=epoch))
        elif script == "hangs":
            progress.at("computes")
        elif answers and script != "mute":
            if script == "long":
                _work(progress, 5.0)
            taken += 1
            answer = b"\xff" if script == "garbles" else _answer(payload, taken)
            if master is None:
                link.write(encode(RankFrameKind.RESULT, answer))
            else:
                master.send(answer)
            if script in ("broken", "raises"):
                is_link = script == "broken"
                link.write(
                    frames.encode_json(RankFrameKind.BROKEN, epoch=epoch, detail="the link tore", is_link=is_link)
                )
                if master is not None:
                    master.end("rank 0: the link tore")


def _read(link: FrameSocket[RankFrameKind], inbox: Inbox) -> None:
    while (frame := link.read()) is not None:
        inbox.put(frame)
    os._exit(1)


def _beat(link: FrameSocket[RankFrameKind], progress: RankProgress) -> None:
    while True:
        beat = RankHeartbeat(mark=progress.mark, doing=progress.doing, is_waiting=progress.is_waiting)
        link.write(frames.encode_record(RankFrameKind.HEARTBEAT, beat))
        time.sleep(_BEAT_S)


def _work(progress: RankProgress, seconds: float) -> None:
    progress.at("works")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(_BEAT_S)
        progress.move()
    progress.at("idle", is_waiting=True)


def _answer(payload: bytes, token: int) -> bytes:
    step = pb.StepMessage.FromString(frames.decode_step(payload)[1])
    sampled = [pb.Sampled(handle=row.handle, token=token) for row in step.rows if row.sample]
    return pb.ResultMessage(epoch=step.epoch, number=step.number, sampled=sampled).SerializeToString()


if __name__ == "__main__":
    main()

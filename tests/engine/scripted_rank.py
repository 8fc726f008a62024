"""A rank process without a model or torch: it speaks the frames of worker.rank and answers each step at once.

The name of its model is its script:
    plain     loads, joins, answers steps: for each sampling row the token that is the step's number
    refuse    says that the model cannot be served
    dies      ends while loading
    stuck     answers no second join: what a rank does whose old group holds it
    mute      takes steps and never answers
    broken    answers step 1, then says that its epoch broke
"""

import os
import socket
import sys

import orjson

from orca.core import engine_pb2 as pb
from orca.worker import frames
from orca.worker.frames import FrameSocket, Kind


def main() -> None:
    link = FrameSocket(socket.socket(fileno=int(sys.argv[1])))
    kind, payload = link.read() or (None, b"")
    assert kind is Kind.START
    settings = orjson.loads(payload)["settings"]
    script = settings["model"]
    if script == "refuse":
        link.write(frames.encode(Kind.REFUSED, b"config.json says so"))
        return
    if script == "dies":
        os._exit(7)
    loaded = {"revision": settings["dtype"], "max_model_len": 64, "weight_bytes": 10, "slots_possible": 40}
    link.write(frames.encode_json(Kind.LOADED, **loaded))
    link.write(frames.encode_json(Kind.BEAT, mark=1, doing="idle", slots_in_use=0))
    is_last = settings["stage"] == settings["stages"] - 1
    joins = 0
    epoch = 0
    while (frame := link.read()) is not None and frame[0] is not Kind.STOP:
        kind, payload = frame
        if kind is Kind.JOIN:
            joins += 1
            if script == "stuck" and joins > 1:
                continue
            epoch = orjson.loads(payload)["epoch"]
            link.write(frames.encode_json(Kind.LEFT, epoch=epoch))
            link.write(frames.encode_json(Kind.JOINED, epoch=epoch))
        elif is_last and script != "mute":
            link.write(frames.encode(Kind.RESULT, _answer(payload)))
            if script == "broken":
                link.write(frames.encode_json(Kind.BROKEN, epoch=epoch, detail="the link tore"))


def _answer(payload: bytes) -> bytes:
    step = pb.StepMessage.FromString(frames.decode_step(payload)[1])
    sampled = [pb.Sampled(handle=row.handle, token=step.number) for row in step.rows if row.sample]
    return pb.ResultMessage(epoch=step.epoch, number=step.number, sampled=sampled).SerializeToString()


if __name__ == "__main__":
    main()

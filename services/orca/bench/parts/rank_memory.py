"""Measure the weights of ranks: `python -m orca.bench.parts.rank_memory MODEL_FOLDER` prints a line per layout.

A line has the bytes of weights per rank, and the sum over all ranks divided by the bytes of one rank alone. A ratio
above 1 shows weights that are held twice: norms, row biases, a tied embedding on the first and the last stage, packed
copies.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from grpc import aio

from orca.bench.parts.stage_processes import Stages
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import engine_pb2_grpc

LAYOUTS = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))


async def weights_of(address: str) -> int:
    """Wait until a stage is loaded, and return the bytes of weights of its ranks."""
    async with aio.insecure_channel(address) as channel:
        stage = engine_pb2_grpc.StageStub(channel)
        while True:
            status = await stage.Status(pb.StatusRequest(), timeout=60, wait_for_ready=True)
            if status.phase == pb.StatusReply.IDLE:
                return int(status.weight_bytes)
            await asyncio.sleep(0.1)


async def main(folder: Path) -> None:
    alone = 0
    for stages, tensor in LAYOUTS:
        with tempfile.TemporaryDirectory() as logs:
            group = Stages(folder, stages=stages, tensor=tensor, log_folder=Path(logs))
            try:
                weights = [await weights_of(address) for address in group.addresses]
            finally:
                group.stop()
        alone = alone or sum(weights)
        per_rank = ", ".join(f"{each / tensor / 1e6:.2f}" for each in weights)
        share = sum(weights) / alone
        print(f"{stages} x {tensor}: {per_rank} MB in a rank of each stage, in all {share:.3f} of one rank alone")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER", help="in Hugging Face layout")
    asyncio.run(main(parser.parse_args().model))

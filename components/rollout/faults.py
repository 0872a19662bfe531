"""A proxy that makes a server behave badly: it cuts and delays a share of the generation requests on their way.

For rehearsals (`rollout.server.faults`) and tests. The faults are real: what the client sees is a closed connection or
an answer that does not come. Everything but generation passes untouched.

    python -m muster.rollout.faults --listen 8001 --upstream 8000 --drop 0.1 --delay 0.1 --delay-seconds 30
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random

_GENERATE = b"POST /inference/v1/generate "
_CHUNK = 1 << 16


async def serve(listen: int, upstream: int, drop: float, delay: float, delay_seconds: float) -> None:
    """Runs the proxy on loopback until it is cancelled.

    Args:
        listen: port to listen on.
        upstream: port of the real server.
        drop: share of generation requests whose connection is cut.
        delay: share of generation requests that are held back.
        delay_seconds: how long those are held back.
    """
    dice = random.SystemRandom()

    async def held_back(source: asyncio.StreamReader, begun: bytes) -> bytes:
        # Keeps reading, so that a client that gives up is noticed and its request never reaches the server.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_seconds):
                while chunk := await source.read(_CHUNK):
                    begun += chunk
                return b""
        return begun

    async def pump_requests(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        # A client without pipelining starts each request in a read of its own.
        while chunk := await source.read(_CHUNK):
            if chunk.startswith(_GENERATE):
                luck = dice.random()
                if luck < drop:
                    return
                if luck < drop + delay and not (chunk := await held_back(source, chunk)):
                    return
            sink.write(chunk)
            await sink.drain()

    async def pump_answers(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(_CHUNK):
            sink.write(chunk)
            await sink.drain()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream)
        except OSError:
            writer.close()
            return
        pumps = {
            asyncio.create_task(pump_requests(reader, up_writer)),
            asyncio.create_task(pump_answers(up_reader, writer)),
        }
        with contextlib.suppress(OSError):
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for side in (writer, up_writer):
            side.transport.abort()

    server = await asyncio.start_server(connection, "127.0.0.1", listen)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Command line of the proxy."""
    parser = argparse.ArgumentParser(
        prog="python -m muster.rollout.faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--upstream", type=int, required=True)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--delay-seconds", type=float, default=30.0)
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(args.listen, args.upstream, args.drop, args.delay, args.delay_seconds))


if __name__ == "__main__":
    main()

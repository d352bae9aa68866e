"""Retrieval: a system prompt, popular chunks of a corpus, a question."""

from perf._users import HttpUser, ZmqUser

SCENARIO = (
    "rag:requests=400,documents=50,chunks=3,chunk_length=96,system_length=32,question_length=24,"
    "output_length=16,rate=0.5"
)


class Rag(HttpUser):
    """Retrieval over HTTP."""

    scenario = SCENARIO


class RagZmq(ZmqUser):
    """Retrieval over ZMQ."""

    scenario = SCENARIO

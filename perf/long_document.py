"""Questions about long documents, each asked about several times."""

from perf._users import HttpUser, ZmqUser

SCENARIO = (
    "long_document:documents=10,document_length=600,questions=20,question_length=24,"
    "output_length=16,rate=0.5"
)


class LongDocument(HttpUser):
    """Long documents over HTTP."""

    scenario = SCENARIO


class LongDocumentZmq(ZmqUser):
    """Long documents over ZMQ."""

    scenario = SCENARIO

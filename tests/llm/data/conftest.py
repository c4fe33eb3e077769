"""The bundled text, opened once for all tests."""

import pytest

from llm.data.corpus import open_corpus
from tests.llm.data.small import data_config


@pytest.fixture(scope="session")
def bundled(tmp_path_factory):
    config = data_config("llm/data/text", held_out="1964*,1978*,1985*")
    return open_corpus(config, 512, tmp_path_factory.mktemp("bundled"))

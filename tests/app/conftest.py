import pytest

import mvm


@pytest.fixture(scope="session")
def digits():
    return mvm.load("digits")

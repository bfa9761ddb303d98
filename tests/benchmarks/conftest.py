"""The programs that several files test."""

import pytest
from programs import imported


@pytest.fixture(scope="module")
def study():
    return imported("study_figures")


@pytest.fixture(scope="module")
def terms():
    return imported("equal_terms")


@pytest.fixture
def preconditioning():
    return imported("preconditioning")

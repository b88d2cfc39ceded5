"""The model that stores are compared with passes their cases itself."""

import pytest

from headgate.stores import conformance
from tests.support.reference_store import ReferenceStore

pytestmark = pytest.mark.once


@pytest.mark.parametrize("case", conformance.ACCOUNT_CASES, ids=lambda case: case.__name__)
def test_the_model_conforms(case: conformance.Case) -> None:
    case(ReferenceStore)

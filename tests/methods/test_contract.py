"""Every method keeps the contract."""

import pytest
from cases import CASES

from bestresponse.testing import MethodContract


@pytest.mark.parametrize("case", CASES, ids=str)
class TestEveryMethod(MethodContract):
    pass

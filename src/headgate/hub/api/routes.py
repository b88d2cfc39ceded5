"""All routes of a hub: router, OpenAPI document and tests are made from them."""

from typing import Final

from headgate.hub.api import (
    admin_account_routes,
    admin_agent_routes,
    admin_hub_routes,
    admin_limit_routes,
    admin_operator_routes,
    admin_policy_routes,
    admin_usage_routes,
    agent_detail_routes,
    agent_routes,
    dashboard_routes,
    decision_routes,
    hold_routes,
    monitoring_routes,
    openapi,
)

ROUTES: Final = (
    *monitoring_routes.ROUTES,
    *openapi.ROUTES,
    *agent_routes.ROUTES,
    *admin_limit_routes.ROUTES,
    *admin_account_routes.ROUTES,
    *admin_usage_routes.ROUTES,
    *admin_policy_routes.ROUTES,
    *admin_agent_routes.ROUTES,
    *agent_detail_routes.ROUTES,
    *admin_operator_routes.ROUTES,
    *admin_hub_routes.ROUTES,
    *decision_routes.ROUTES,
    *hold_routes.ROUTES,
    *dashboard_routes.ROUTES,
)

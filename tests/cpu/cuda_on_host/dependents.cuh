// Nothing on the host runs before what it depends on.
#pragma once
inline void wait_for_prerequisites() {}
inline void let_dependents_start() {}

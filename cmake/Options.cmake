# Declares options so that the summary at the end of a configure run can list every one of them.
# A group is one of: what (is built), torch, how (it is built).
set(HS_OPTION_NAMES "")

function(hs_option name text default group)
  option(${name} "${text}" ${default})
  set(HS_OPTION_NAMES ${HS_OPTION_NAMES} ${name} PARENT_SCOPE)
  set(HS_OPTION_GROUP_${name} ${group} PARENT_SCOPE)
endfunction()

function(hs_value name text default group)
  set(${name} "${default}" CACHE STRING "${text}")
  set(HS_OPTION_NAMES ${HS_OPTION_NAMES} ${name} PARENT_SCOPE)
  set(HS_OPTION_GROUP_${name} ${group} PARENT_SCOPE)
endfunction()

-- What the parts of decide.lua share besides.

local fmod = math.fmod

local function say(number)
  length = length + 1
  answer[length] = number
end

local function digits(number)
  return string.format('%.0f', number)
end
